"""A drafter's folder that cannot be loaded: what is wrong, and with which folder."""

import json

import pytest
from layouts import LAYOUTS, write
from tiny import near_copy, ppd_folder, tiny_model

import hf_paradraft

DAMAGED = {
    "names no mask token": (
        "pard",
        {"mask_token_id": None, "pard_token": None, "ptd_token_id": None},
    ),
    "num_draft_tokens is -1, and has to be": (
        "pard",
        {"paradraft": {"speculation_config": {"num_draft_tokens": -1}}},
    ),
    "other sizes than the config says": ("pard", {"hidden_size": 64}),
    "style is 'x'": ("parallelspec", {"style": "x"}),
    "its config asks for": ("parallelspec", {"num_masks": 3}),
    "has a head on the token before": ("parallelspec", {"markov_rank": 4}),
    "acceptance must be": (
        "autoregressive",
        {"paradraft": {"kind": "autoregressive", "speculation_config": {"acceptance": "x"}}},
    ),
    "lacks 9 of the model's weights": ("autoregressive", {"num_hidden_layers": 3}),
    "falling by rank": ("ppd", {"accuracy": [[2.0]]}),
    "hidden_act is .no such., and has to be": ("z-lab", {"hidden_act": "no such"}),
    "vocab_size is .many., and has to be": ("z-lab", {"vocab_size": "many"}),
    "hidden_size is .many., and has to be": ("pard", {"hidden_size": "many"}),
    "return_dict is False, and has to be true": ("z-lab", {"return_dict": False}),
    "text_config.return_dict is False": ("pard", {"text_config": {"return_dict": False}}),
    "json: return_dict is False": ("autoregressive", {"return_dict": False}),
    "initializer_range is -0.5, and has to be": ("z-lab", {"initializer_range": -0.5}),
    "_proj.weight is .*, and its config asks for": ("SafeAI, interleaved", {"head_dim": 64}),
    "dspine_config is .1., and has to be": ("z-lab", {"dspine_config": [1]}),
    "dspine_config.top_k is 0.5, and has to be": ("z-lab", {"dspine_config": {"top_k": 0.5}}),
    "fc reads 96 numbers": ("z-lab", {"hidden_size": 64}),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_errors_of_damaged_folders_name_the_folder(message, tmp_path, monkeypatch):
    """By its path, and by a name that is an ordinary word."""
    name, changes = DAMAGED[message]
    folder = tmp_path / "drafter"
    if name == "ppd":
        folder = ppd_folder(tmp_path).rename(folder)
    elif name in LAYOUTS:
        write(folder, *LAYOUTS[name]())
    else:
        target = tiny_model()
        made = {
            "pard": near_copy,
            "parallelspec": lambda target: hf_paradraft.ParallelSpecDrafter.from_target(
                target, num_masks=2
            ),
            "autoregressive": hf_paradraft.AutoregressiveDrafter,
        }[name](target)
        made.save_pretrained(folder)
    config = folder / ("adapter_config.json" if name == "ppd" else "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    monkeypatch.chdir(tmp_path)
    for given in (folder, "drafter"):
        with pytest.raises((OSError, ValueError), match=message) as raised:
            hf_paradraft.AutoDrafter.from_pretrained(given)
        assert str(raised.value).startswith((f"{given}: ", f"{given}/config.json: ")) or str(
            folder
        ) in str(raised.value)
