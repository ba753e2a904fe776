"""Drafters that have no guess cost little and change nothing."""

from time import process_time

import pytest
import torch
from lossless import assert_lossless
from tiny import tiny_model

import hf_paradraft
from hf_paradraft.decoding import batch, drafts, loop

TARGET = tiny_model("llama")


class Silent(hf_paradraft.Drafter, hf_paradraft.Drafting):
    """Is asked, takes its time, and never has a guess."""

    def __init__(self, guess):
        self.guess, self.asked = guess, 0
        self.speculation_config = hf_paradraft.SpeculationConfig(6)

    def start_drafting(self, target, max_length):
        return self

    def propose(self, prefixes):
        self.asked += 1
        begun = process_time()
        while process_time() < begun + 0.01:  # more than a round of the target
            pass
        return [self.guess(prefix) for prefix in prefixes]


NOTHING = {
    "no tokens": lambda prefix: hf_paradraft.GuessedTokens(torch.zeros(0, dtype=torch.long)),
    "no logits": lambda prefix: hf_paradraft.GuessedLogits(torch.zeros(0, 32)),
    "NaN": lambda prefix: hf_paradraft.GuessedLogits(torch.full((prefix.room, 32), torch.nan)),
    "impossible": lambda prefix: hf_paradraft.GuessedLogits(
        torch.full((prefix.room, 32), -torch.inf)
    ),
}


@pytest.mark.parametrize("size", [None, 8, "auto"])
@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize("new", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_drafters_that_never_guess_are_seldom_asked(name, size, new, prompt, monkeypatch):
    """By this process's own time, for rounds of a tiny model are shorter than a pause."""
    for module in (loop, batch, drafts):
        monkeypatch.setattr(module, "perf_counter", process_time)
    drafter = Silent(NOTHING[name])
    drafter.speculation_config.tree_size = size
    options = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None}
    target = TARGET
    for _ in range(2):
        drafter.asked = 0
        assert_lossless(target, drafter, prompt, **options)
        assert 1 <= drafter.asked <= new / 3
