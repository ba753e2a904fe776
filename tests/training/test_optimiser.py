"""Muon and AdamW as one optimiser: the steps of each, schedules, and checkpoints."""

import copy

import pytest
import torch
from torch import nn

from hf_paradraft.training.anchors import MuonAdamW

OPTIONS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.head = nn.Linear(6, 8), nn.Linear(8, 3, bias=False)

    def loss(self, seed):
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        return self.head(self.up_proj(inputs).relu()).square().mean()


def steps(layer, optimisers, count, begin=0):
    for seed in range(begin, begin + count):
        layer.loss(seed).backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return Layer()


def test_each_takes_its_own_steps(layer):
    other = copy.deepcopy(layer)
    ours = steps(layer, [MuonAdamW(layer, 0.01, **OPTIONS)], 4)
    muon = torch.optim.Muon(
        [other.up_proj.weight], lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )
    rest = torch.optim.AdamW(
        [other.up_proj.bias, other.head.weight], lr=0.01, **{**OPTIONS, "weight_decay": 0.0}
    )
    assert torch.equal(ours, steps(other, [muon, rest], 4))


def test_a_schedule_reaches_both(layer):
    optimiser = MuonAdamW(layer, 0.01, **OPTIONS)
    # as accelerate does: groups are other ones from here on
    optimiser.load_state_dict(optimiser.state_dict())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1.0 if step == 0 else 0.0)
    before = steps(layer, [optimiser], 1)
    schedule.step()
    assert torch.equal(before, steps(layer, [optimiser], 1))


def test_a_checkpoint_goes_on_as_if_nothing_had_been(layer):
    other, third = copy.deepcopy(layer), copy.deepcopy(layer)
    whole = steps(layer, [MuonAdamW(layer, 0.01, **OPTIONS)], 6)
    first = MuonAdamW(other, 0.01, **OPTIONS)
    steps(other, [first], 3)
    third.load_state_dict(other.state_dict())
    second = MuonAdamW(third, 0.01, **OPTIONS)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert torch.equal(whole, steps(third, [second], 3, begin=3))


@pytest.mark.parametrize("name", ["up_proj.weight", "head.weight"])
def test_one_kind_of_weight_is_enough(name, layer):
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    layer.get_parameter(name).requires_grad_(True)
    before = layer.get_parameter(name).clone()
    steps(layer, [MuonAdamW(layer, 0.01, **OPTIONS)], 1)
    assert not torch.equal(before, layer.get_parameter(name))
