"""Drafters that are trained on a frozen target: the loss falls on what it should, runs resume, and
what is saved drafts.
"""

import json
import shutil

import pytest
import torch
from checkpoints import config_of, with_mtp
from lossless import assert_lossless
from safetensors.torch import load_file, save_file
from tiny import EOS, make_tokenizer, tiny_model
from trained import train_dflash, train_dspark, train_eagle3, train_mtp, train_parallelspec
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft.cli import app
from hf_paradraft.drafters import kind_of
from hf_paradraft.drafters.formats.folder import DrafterFolder
from hf_paradraft.training.anchors import AnchorTrainer
from hf_paradraft.training.target_training import unused_token

OPTIONS = {
    "per_device_train_batch_size": 4,
    "warmup_steps": 0,
    "seed": 42,
    "learning_rate": 3e-3,
    "use_cpu": True,
    "max_length": 64,
}
RUNS = {
    "parallelspec": train_parallelspec,
    "dspark": train_dspark,
    "dflash": train_dflash,
    "eagle3": train_eagle3,
    "mtp": train_mtp,
}
SMALL = {
    "parallelspec": {"style": "eagle", "num_masks": 2},
    "dspark": {"block_size": 3, "num_features": 2},
    "eagle3": {"num_draft_tokens": 2},
    "mtp": {"num_draft_tokens": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "loss"),
    [("medusa", "ce"), pytest.param("medusa", "tv", marks=pytest.mark.nightly), ("eagle", "tv")],
)
def test_parallelspec_learns(style, loss, folder):
    rows = folder / "rows.jsonl"
    options = {
        **OPTIONS,
        "style": style,
        "loss": loss,
        "num_masks": 2,
        "eval_file": folder / "some.jsonl",
        "vocab": 24,
    }
    drafter = train_parallelspec(folder / "target", rows, folder / "out", max_steps=60, **options)
    record = drafter.paradraft["training"]
    assert record["steps"] == 60
    assert record["eval"]["eval_loss_depth_0"] < (2.5 if loss == "ce" else 0.75)
    assert record["acceptance"]["mean_emitted"] > 1.25
    again = hf_paradraft.AutoDrafter.from_pretrained(folder / "out")
    assert again.config.style == style
    assert again.paradraft["training"]["style"] == style
    target = tiny_model("llama", num_hidden_layers=6, dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    assert_lossless(target, again, ids, max_new_tokens=30)
    kind = kind_of(saved := DrafterFolder(folder / "out"))
    kind.check_folder(saved)
    assert kind.card_fields(saved).provenance["training"]["num_masks"] == 2
    with pytest.raises(ValueError, match="already has files"):
        train_parallelspec(folder / "target", rows, folder / "out", max_steps=1, **OPTIONS)


@pytest.mark.slow
def test_eagle3_learns(folder):
    rows = folder / "rows.jsonl"
    tiny_model(
        "llama", num_hidden_layers=8, initializer_range=0.15, dtype=torch.float32
    ).save_pretrained(folder / "deep")
    make_tokenizer().save_pretrained(folder / "deep")
    options = {**OPTIONS, "num_draft_tokens": 3, "eval_file": folder / "some.jsonl", "vocab": 24}
    drafter = train_eagle3(
        folder / "deep", rows, folder / "out", max_steps=60, cache_dir=folder / "states", **options
    )
    record = drafter.paradraft["training"]
    assert record["method"] == "eagle3"
    # 0.50 after one step: the target is sure of little
    assert record["eval"]["eval_acceptance_depth_2"] > 0.6
    assert record["acceptance"]["mean_emitted"] > 1
    again = hf_paradraft.AutoDrafter.from_pretrained(folder / "out")
    assert isinstance(again, hf_paradraft.Eagle3Drafter)
    assert again.speculation_config.num_draft_tokens == 3
    target = tiny_model("llama", num_hidden_layers=8, dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    assert_lossless(target, again, ids, max_new_tokens=30, eos_token_id=EOS)
    kind_of(saved := DrafterFolder(folder / "out")).check_folder(saved)
    with pytest.raises(ValueError, match="7 are needed"):
        hf_paradraft.Eagle3Drafter.from_target(tiny_model("llama", dtype=torch.float32))
    with pytest.raises(ValueError, match="num_anchors must be at least 1"):
        train_eagle3(folder / "target", rows, folder / "none", num_anchors=0)


@pytest.mark.slow
def test_a_new_mtp_layer_learns(folder):
    rows = folder / "rows.jsonl"
    options = {**OPTIONS, "eval_file": folder / "some.jsonl", "vocab": 24}
    drafter = train_mtp(
        folder / "target",
        rows,
        folder / "out",
        max_steps=60,
        cache_dir=folder / "states",
        **options,
    )
    record = drafter.paradraft["training"]
    assert record["method"] == "mtp"
    assert record["eval"]["eval_acceptance_depth_2"] > 0.15
    assert record["acceptance"]["mean_emitted"] > 1.05
    again = hf_paradraft.AutoDrafter.from_pretrained(folder / "out")
    assert isinstance(again, hf_paradraft.MtpDrafter)
    assert len(again.vocabulary) == 24
    target = tiny_model("llama", num_hidden_layers=6, dtype=torch.float32)
    assert_lossless(target, again, torch.tensor([[1, 2, 3]]), max_new_tokens=30, eos_token_id=EOS)
    kind_of(saved := DrafterFolder(folder / "out")).check_folder(saved)


@pytest.mark.slow
def test_the_mtp_layer_that_a_target_brings_is_trained_on(folder):
    """It begins where the checkpoint's stands, and not anew."""
    made, _ = with_mtp("mimo")
    tensors = {
        name.removeprefix("model.") if "mtp" in name else name: tensor
        for name, tensor in load_file(made / "model.safetensors").items()
    }
    shutil.copytree(made, folder / "brings")
    save_file(tensors, folder / "brings" / "model.safetensors", metadata={"format": "pt"})
    config_of("mimo").save_pretrained(folder / "brings")
    make_tokenizer().save_pretrained(folder / "brings")
    options = {**OPTIONS, "learning_rate": 1e-9, "max_steps": 1}
    drafter = train_mtp(folder / "brings", folder / "rows.jsonl", folder / "out", **options)
    expected = tensors["mtp_layers.0.input_proj.weight"]
    torch.testing.assert_close(
        drafter.layers[0].eh_proj.weight.detach(), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_blocks_learn(kind, folder):
    rows = folder / "rows.jsonl"
    heads = {"markov_rank": 4, "block_size": 3} if kind == "dspark" else {"block_size": 4}
    options = {**OPTIONS, **heads, "num_features": 3, "num_layers": 1}
    drafter = RUNS[kind](
        folder / "target",
        rows,
        folder / "out",
        max_steps=120,
        eval_file=folder / "some.jsonl",
        vocab=24,
        **options,
    )
    record = drafter.paradraft["training"]
    assert record["eval"]["eval_acceptance_depth_0"] > 0.2
    assert record["acceptance"]["mean_emitted"] > 1.15
    again = hf_paradraft.AutoDrafter.from_pretrained(folder / "out")
    assert isinstance(again, hf_paradraft.DSparkDrafter) == (kind == "dspark")
    written = json.loads((folder / "out" / "config.json").read_text())
    assert written["speculators_model_type"] == kind
    assert written["sample_from_anchor"] == (kind == "dspark")  # vLLM refuses it of DFlash
    assert "aux_hidden_state_layer_ids" in written
    target = tiny_model("llama", num_hidden_layers=6, dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    assert_lossless(target, again, ids, max_new_tokens=30, eos_token_id=EOS)


@pytest.mark.parametrize("what", ["parallelspec", "dspark", "eagle3"])
def test_a_target_in_bf16_and_a_drafter_in_fp32(what, folder, bf16, caplog):
    if what == "eagle3":
        tiny_model("llama", num_hidden_layers=7, dtype=torch.float32).save_pretrained(
            folder / "target"
        )
    drafter = RUNS[what](
        folder / "target",
        folder / "rows.jsonl",
        folder / "out",
        max_steps=2,
        **OPTIONS,
        **SMALL[what],
    )
    assert "run in bfloat16" in caplog.text
    assert all(
        parameter.dtype == torch.float32 and parameter.isfinite().all()
        for parameter in drafter.parameters()
    )
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    again = hf_paradraft.AutoDrafter.from_pretrained(folder / "out", dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    assert_lossless(target, again, ids, max_new_tokens=12, eos_token_id=EOS)


def test_projections_are_trained_by_muon_unless_another_optimiser_is_asked_for(folder, monkeypatch):
    made = []
    whole = AnchorTrainer.create_optimizer
    monkeypatch.setattr(
        AnchorTrainer,
        "create_optimizer",
        lambda self, model=None: made.append(whole(self, model)) or made[-1],
    )
    for number, more in enumerate([{}, {"optim": "adamw_torch"}]):
        train_mtp(
            folder / "target",
            folder / "some.jsonl",
            folder / str(number),
            max_steps=1,
            **OPTIONS,
            **SMALL["mtp"],
            **more,
        )
    assert [type(optimiser).__name__ for optimiser in made] == ["MuonAdamW", "AdamW"]
    muon, _ = made[0].parts
    assert isinstance(muon, torch.optim.Muon)
    assert len(muon.param_groups[0]["params"]) == 8  # of attention, MLP and `eh_proj`


@pytest.mark.parametrize(("what", "other"), [("mtp", {"new": True}), ("eagle3", {"num_layers": 2})])
def test_a_trained_drafter_is_gone_on_with(what, other, folder):
    rows, options = folder / "some.jsonl", {**OPTIONS, **SMALL[what], "max_steps": 1}
    train = RUNS[what]
    tiny_model("llama", num_hidden_layers=7, dtype=torch.float32).save_pretrained(folder / "target")
    first = train(folder / "target", rows, folder / "first", vocab=24, **options)
    more = {"begin_with": folder / "first"}
    second = train(
        folder / "target", rows, folder / "second", **{**options, "learning_rate": 1e-9}, **more
    )
    assert torch.equal(second.vocabulary, first.vocabulary)
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
    for wrong in ({"vocab": 24}, other):
        with pytest.raises(ValueError, match=f"leave out {next(iter(wrong))}"):
            train(folder / "target", rows, folder / "third", **wrong, **more, **options)
    with pytest.raises(ValueError, match="which this run reads"):
        train(folder / "target", rows, folder / "first", overwrite=True, **more, **options)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["parallelspec", "dspark", "eagle3", "mtp"])
def test_a_resumed_run_is_the_run_that_would_have_been(what, folder):
    run, options = RUNS[what], {**OPTIONS, **SMALL[what], "lr_scheduler_type": "constant"}
    rows = folder / "rows.jsonl"
    if what == "eagle3":
        tiny_model("llama", num_hidden_layers=7, dtype=torch.float32).save_pretrained(
            folder / "target"
        )
    whole = run(folder / "target", rows, folder / "whole", max_steps=8, **options)
    run(folder / "target", rows, folder / "parts", max_steps=4, save_steps=4, **options)
    parts = run(folder / "target", rows, folder / "parts", max_steps=8, resume=True, **options)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_train_commands_write_drafters_that_load(folder):
    common = [
        "--target",
        str(folder / "target"),
        "--train-file",
        str(folder / "rows.jsonl"),
        "--max-steps",
        "2",
        "--max-length",
        "64",
    ]
    made = [
        [
            "train",
            "parallelspec",
            *common,
            "--output-dir",
            str(folder / "p"),
            "--style",
            "eagle",
            "--num-masks",
            "2",
        ],
        [
            "train",
            "dspark",
            *common,
            "--output-dir",
            str(folder / "d"),
            "--block-size",
            "3",
            "--num-features",
            "2",
        ],
    ]
    for arguments in made:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert isinstance(
        hf_paradraft.AutoDrafter.from_pretrained(folder / "p"), hf_paradraft.ParallelSpecDrafter
    )
    assert isinstance(
        hf_paradraft.AutoDrafter.from_pretrained(folder / "d"), hf_paradraft.DSparkDrafter
    )
    for what in ("parallelspec", "dspark"):
        shown = CliRunner().invoke(app, ["train", what, "--help"]).output
        assert "Example" in shown


BAD = {
    "style": (
        train_parallelspec,
        {"style": "hydra"},
        "style is 'hydra', and has to be medusa or eagle",
    ),
    "loss": (train_parallelspec, {"loss": "kl"}, "loss is 'kl', and has to be ce or tv"),
    "masks": (train_parallelspec, {"num_masks": 0}, "num_masks must be at least 1, but is 0"),
    "context": (train_parallelspec, {"max_length": 4096}, "longer than the model's context"),
    "vocabulary": (train_parallelspec, {"vocab": 1}, "special ones"),
    "block": (train_dspark, {"block_size": 1}, "block_size must be at least 2"),
    "features": (train_dspark, {"num_features": 9}, "9 of them cannot be read"),
    "head": (train_dspark, {"markov_type": "lstm"}, "vanilla or gated or rnn"),
    "heads": (train_dspark, {"markov_rank": 0, "confidence": False}, "train dflash"),
    "steps": (train_dspark, {"max_steps": 0}, "trains nothing"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_options(what, folder):
    run, options, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        run(
            folder / "target",
            folder / "rows.jsonl",
            folder / "out",
            **{**OPTIONS, "max_steps": 1, **options},
        )
    assert not (folder / "out").exists() or not any((folder / "out").iterdir())


def test_the_unused_token_never_occurs_in_text():
    tokenizer = make_tokenizer()
    assert unused_token(tokenizer, 32) == 31
    tokenizer.mask_token = None
    assert unused_token(tokenizer, 40) == 39
    tokenizer.add_special_tokens({"additional_special_tokens": ["<one>", "<two>"]})
    assert unused_token(tokenizer, 34) == 33


@torch.no_grad()
def test_states_and_embeddings_weigh_the_same_at_first():
    """Normed states are many times as large as embeddings, which they would drown."""
    target = tiny_model("llama", num_hidden_layers=2, dtype=torch.float32)
    target.model.norm.weight.mul_(3.0)
    drafter = hf_paradraft.ParallelSpecDrafter.from_target(target, "eagle", 2)
    ids = torch.arange(28)[None]
    embedded, normed = target.get_input_embeddings()(ids), target.model(ids).last_hidden_state
    both = [drafter.text(ids, normed), drafter.text(ids, torch.zeros_like(normed))]
    assert (both[0] - both[1]).std() / embedded.std() == pytest.approx(1.0, rel=0.3)
    assert both[1].std() / embedded.std() == pytest.approx(1.0, rel=0.05)
