"""Drafters that have no guess, or none that goes further, cost little and change nothing."""

import pytest
import torch
from tiny import tiny_model

import hf_paradraft as pd

TARGET = tiny_model("llama")


class Silent(pd.Drafter, pd.Drafting):
    """Is asked, takes its time, and never has a guess."""

    def __init__(self, guess):
        self.guess, self.asked = guess, 0
        self.speculation_config = pd.SpeculationConfig(6)

    def start_drafting(self, target, max_length):
        return self

    def propose(self, prefixes):
        self.asked += 1
        return [self.guess(prefix) for prefix in prefixes]


NOTHING = {
    "no tokens": lambda prefix: pd.GuessedTokens(torch.zeros(0, dtype=torch.long)),
    "no logits": lambda prefix: pd.GuessedLogits(torch.zeros(0, 32)),
    "NaN": lambda prefix: pd.GuessedLogits(torch.full((prefix.room, 32), torch.nan)),
    "impossible": lambda prefix: pd.GuessedLogits(torch.full((prefix.room, 32), -torch.inf)),
}


@pytest.mark.parametrize("size", [None, 8, "auto"])
@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize("new", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_who_never_guesses_is_seldom_asked(name, size, new, prompt):
    drafter = Silent(NOTHING[name])
    drafter.speculation_config.tree_size = size
    options = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None}
    target = TARGET
    for _ in range(2):
        drafter.asked = 0
        assert torch.equal(target.generate(prompt, **options), target.generate(prompt, **options, assistant_model=drafter))
        assert 1 <= drafter.asked <= new / 3


class Stuck(Silent):
    """Promises to go further, and never does."""

    def propose(self, prefixes):
        self.asked += 1
        guess = [pd.GuessedLogits(torch.zeros(1, 32), further=lambda: self.propose(prefixes), decoded=1) for _ in prefixes]
        return guess


def test_who_does_not_get_further_is_left_alone(prompt):
    drafter = Stuck(None)
    drafter.speculation_config.never_slower = False
    TARGET.generate(prompt, do_sample=False, max_new_tokens=5, eos_token_id=None, assistant_model=drafter)
    assert drafter.asked <= 12


def test_riders_and_a_vocabulary(prompt):
    riders = pd.Riders(torch.zeros(2, 32))
    drafter = Silent(lambda prefix: pd.GuessedLogits(torch.zeros(1, 4), vocabulary=torch.arange(4), riders=riders))
    with pytest.raises(ValueError, match="do not go together"):
        TARGET.generate(prompt, do_sample=False, max_new_tokens=8, eos_token_id=None, assistant_model=drafter)
