"""A ParallelSpec drafter says when its target is not the one that it was made for, and in what it
differs.
"""

import copy
import json

import pytest
import torch
from accelerate import cpu_offload
from tiny import tiny_model

import hf_paradraft

quanto = pytest.importorskip("optimum.quanto", reason="not in the environments of other versions")

TARGET = tiny_model(num_hidden_layers=3)


def changed(part):
    """The target with another weight."""
    target = copy.deepcopy(TARGET)
    with torch.no_grad():
        target.get_parameter(part).mul_(1.5)
    return target


def packed():
    target = copy.deepcopy(TARGET)
    quanto.quantize(target.model.layers, weights=quanto.qint8)
    quanto.freeze(target.model.layers)
    return target


OTHERS = {
    "3 layers, not 2": lambda: tiny_model(num_hidden_layers=2),
    "another embedding": lambda: changed("model.embed_tokens.weight"),
    "another last layer": lambda: changed("model.layers.2.mlp.down_proj.weight"),
}
ITSELF = {
    "a copy": lambda: copy.deepcopy(TARGET),
    "another dtype": lambda: copy.deepcopy(TARGET).to(torch.bfloat16),
    "offloaded": lambda: cpu_offload(copy.deepcopy(TARGET)),
    "packed": packed,
    "not told apart": lambda: changed("model.layers.0.mlp.down_proj.weight"),
}


@pytest.fixture
def folder(tmp_path):
    hf_paradraft.ParallelSpecDrafter.from_target(TARGET, num_masks=2).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("difference", OTHERS)
def test_attaching_to_another_target_warns(difference, folder, caplog):
    hf_paradraft.AutoDrafter.from_pretrained(folder).attach(OTHERS[difference]())
    assert "made for another target" in caplog.text
    assert difference in caplog.text


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("name", ITSELF)
def test_attaching_to_its_own_target_does_not_warn(name, older, folder, caplog):
    """Also where the drafter was saved before more than the embedding was looked at."""
    if older:
        config = json.loads((folder / "config.json").read_text())
        del config["layer_fingerprint"], config["target_layers"]
        (folder / "config.json").write_text(json.dumps(config))
    hf_paradraft.AutoDrafter.from_pretrained(folder).attach(ITSELF[name]())
    assert "another target" not in caplog.text
