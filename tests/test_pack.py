"""Weights that are packed for products on a CPU."""

from copy import deepcopy

import pytest
import torch
from tiny import near_copy, tiny_model
from torch import nn

from hf_paradraft import SpeculationConfig, pack


@pytest.fixture
def target():
    """A model in fp32, packed; its texts are compared with themselves, so near-ties do not matter
    between machines.
    """
    target = tiny_model(dtype=torch.float32)
    assert pack(target) == sum(type(part) is nn.Linear for part in target.modules())
    return target


def products(layer: nn.Linear, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of a layer: as it is called, and with its weight as it is now."""
    states = torch.randn(rows, layer.in_features, dtype=layer.weight.dtype)
    return layer(states), nn.functional.linear(states, layer.weight, layer.bias)


@torch.no_grad()
def test_products_are_the_layers_own(target):
    layer = target.model.layers[0].mlp.up_proj
    assert layer.forward.packed.numel() == 0
    torch.testing.assert_close(*products(layer, 5))
    assert layer.forward.packed.is_mkldnn


@torch.no_grad()
def test_changed_weights_are_seen(target):
    layer = target.model.layers[0].mlp.up_proj
    for change in (
        lambda: layer.weight.mul_(2),
        lambda: layer.to(torch.float64),
        lambda: layer.to(torch.float32),
    ):
        products(layer, 5)
        change()
        torch.testing.assert_close(*products(layer, 5))
    other = deepcopy(layer)
    other.weight.mul_(3)
    torch.testing.assert_close(*products(other, 5))
    torch.testing.assert_close(*products(layer, 5))


def test_a_packed_model_learns(target):
    target(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    assert all(parameter.grad is not None for parameter in target.parameters())


@pytest.mark.parametrize("tree_size", [None, "auto"])
def test_drafted_texts_are_the_packed_models(target, tree_size):
    drafter, prompt = near_copy(target, 0.02), torch.tensor([[5, 6, 7]])
    drafter.speculation_config = SpeculationConfig(4, tree_size, never_slower=False)
    plain = target.generate(prompt, max_new_tokens=40, do_sample=False)
    assert target.generate(
        prompt, max_new_tokens=40, do_sample=False, assistant_model=drafter
    ).equal(plain)
    assert drafter.last_stats.num_rounds < 30


def test_a_model_without_such_weights_is_refused():
    with pytest.raises(ValueError, match="no weights that can be packed"):
        pack(tiny_model())


def test_costs_are_measured_anew(target, monkeypatch, tmp_path):
    from hf_paradraft.decoding import latency

    monkeypatch.setattr(latency, "FOLDER", tmp_path)
    measured = []
    monkeypatch.setattr(
        latency,
        "measure",
        lambda model: measured.append(model) or latency.RowLatency([1, 2], [1.0, 2.0]),
    )
    plain = tiny_model(dtype=torch.float32)
    for model in (target, target, plain):
        latency.row_latency(model)
    pack(plain)
    latency.row_latency(plain)
    assert measured == [target, plain]  # the table of one that is packed was there
