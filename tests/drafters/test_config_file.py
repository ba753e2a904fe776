"""A drafter's config that somebody else wrote: whatever stands in it, it drafts, or one sentence
says what is wrong.
"""

import copy
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, write
from layouts.parts import LAYERS
from safetensors.torch import load_file
from tiny import near_copy, tiny_model

import hf_paradraft
from hf_paradraft.drafters.formats.keys import PARTS
from hf_paradraft.drafters.formats.layout import Said
from hf_paradraft.drafters.formats.values import NESTED, RULES, check_config
from hf_paradraft.integration.publish import describe

VALUES = (
    None, 0, -1, 10**9, "x", "", [], {}, True, 1.5, [1, "x"], [0], [-5], [10**6], float("nan"),
    [[]], {"x": 1}, -1e30, "\x1b[31m",
)  # fmt: skip
OURS = {
    "pard": lambda target: near_copy(tiny_model()),
    "parallelspec": lambda target: hf_paradraft.ParallelSpecDrafter.from_target(
        target, "eagle", num_masks=2
    ),
    "autoregressive": lambda target: hf_paradraft.AutoregressiveDrafter(tiny_model()),
}


def places(config, before=()):
    """Every name and number that leads to a value."""
    for key in config if isinstance(config, dict) else range(len(config)):
        yield (*before, key)
        if isinstance(config[key], dict | list):
            yield from places(config[key], (*before, key))


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def published(tmp_path_factory, target):
    """Folder and config of every layout, and of our own."""
    root = tmp_path_factory.mktemp("published")
    for name in (*LAYOUTS, *OURS):
        folder = root / name.replace(" ", "-").replace(",", "")
        if name in LAYOUTS:
            write(folder, *LAYOUTS[name]())
        else:
            OURS[name](target).save_pretrained(folder)
    return [
        (folder, json.loads((folder / "config.json").read_text()))
        for folder in sorted(root.iterdir())
    ]


@pytest.mark.slow
@pytest.mark.hypothesis
@settings(
    max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_mutated_config_drafts_or_gives_one_sentence(data, published, target):
    folder, config = published[data.draw(st.integers(0, len(published) - 1), label="layout")]
    config = copy.deepcopy(config)
    *lead, last = data.draw(st.sampled_from(list(places(config))), label="key")
    value = data.draw(st.sampled_from(VALUES), label="value")
    inside = config
    for key in lead:
        inside = inside[key]
    inside[last] = value
    (folder / "config.json").write_text(json.dumps(config))
    ids = torch.tensor([[1, 2, 3]])
    try:
        describe(str(folder))
        drafter = hf_paradraft.AutoDrafter.from_pretrained(folder)
        out = target.generate(
            ids, assistant_model=drafter, max_new_tokens=3, do_sample=False, eos_token_id=None
        )
    except (ValueError, OSError) as error:
        message = str(error)
        assert "\x1b" not in message
        if all(key in NESTED for key in lead) and last in RULES and not RULES[last].holds(value):
            where = ".".join(map(str, (*lead, last)))
            assert message.startswith(
                f"{folder / 'config.json'}: {where} is {value!r}, and has to be "
            ), message
    else:
        assert torch.equal(
            out, target.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
        )


def test_the_sentence_names_file_key_and_value(tmp_path):
    config = {"dflash_config": {"target_layer_ids": [1, "two"]}}
    with pytest.raises(
        ValueError,
        match=r"config.json: dflash_config.target_layer_ids is .1, 'two'., and has to be a list",
    ):
        check_config(config, tmp_path / "config.json")
    check_config(
        {
            "vision_config": {"hidden_size": None},
            "num_key_value_heads": [4, 8],
            "something": object(),
        },
        tmp_path,
    )


def test_the_tensors_of_a_layout_are_what_its_config_says(published):
    """What is mutated drafts as long as nothing is changed."""
    for folder, config in published:
        check_config(config, folder / "config.json")
        assert load_file(folder / "model.safetensors")


def test_every_key_that_a_layout_asks_for_has_a_rule(published, monkeypatch):
    """DSpine's had none: odd values of them were loaded, and raised in the midst of `generate`."""
    only, asked = Said.only, set()

    def recorded(self, part, *keys):
        asked.update((part, *keys))
        return only(self, part, *keys)

    monkeypatch.setattr(Said, "only", recorded)
    for folder, config in published:
        (folder / "config.json").write_text(json.dumps(config))  # it may have been mutated
        describe(str(folder))
    assert asked - {""} <= RULES.keys()
    assert {*PARTS} <= NESTED
