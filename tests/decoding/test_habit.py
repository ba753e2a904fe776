"""What calls tell the next: that drafting paid, or not; luck decides little, and old luck is soon forgotten."""

import numpy
import pytest
import torch
from test_pace import K, play

from hf_paradraft.decoding.cost import RoundCost
from hf_paradraft.decoding.habit import FIRST_PAUSE, Habit
from hf_paradraft.decoding.latency import RowLatency
from hf_paradraft.decoding.pace import Pace
from hf_paradraft.protocol import Draft


def test_a_call_remembers_that_drafting_did_not_pay():
    habit = Habit(6)
    asked = []
    for _ in range(3):
        own = Pace(6, chain=False, habit=habit)
        drafted = 0
        for _ in range(60):
            depth = own.depth()
            drafted += depth > 0
            draft = Draft.chain(torch.arange(depth))
            own.observe([draft], [[]], 0.1 * (depth > 0), 1.0 + 0.3 * (depth > 0), 1.01 + 0.4 * (depth > 0))
        asked.append(drafted)
    assert asked[0] > asked[1] >= asked[2] >= 1
    own = Pace(6, chain=True, habit=habit)
    for _ in range(60):
        depth = own.depth()
        path = list(range(depth))
        own.observe([Draft.chain(torch.arange(depth))], [path], 0.1, 1.0, 1.1)
    assert habit.pause == FIRST_PAUSE


@pytest.mark.parametrize("chain", [True, False])
def test_luck_decides_little(chain):
    """A drafter that is right in two rounds of five, and then pays, is not given up for a few rounds without a hit."""
    asked = []
    for seed in range(12):
        generator, habit = numpy.random.default_rng(seed), Habit(2)
        for _ in range(4):
            pace, rounds = Pace(2, chain, habit=habit), []
            while len(rounds) < 70:
                rounds.append(pace.depth())
                hit = rounds[-1] > 0 and generator.random() < 0.4
                verify = 1.0 + 0.04 * rounds[-1]
                pace.observe([Draft.chain(torch.arange(rounds[-1]))], [[0] if hit else []], 0.1, verify, verify + 0.1)
            asked.append(sum(depth > 0 for depth in rounds) / 70)
    assert numpy.mean(asked) > 0.9


@pytest.mark.parametrize("chain", [True, False])
def test_good_calls_do_not_pay_for_a_hopeless_one(chain):
    """What they brought is soon forgotten where the text has changed."""
    habit, generator = Habit(K), numpy.random.default_rng(0)
    for _ in range(6):
        play(Pace(K, chain, habit=habit), 128, lambda done: 2 if generator.random() < 0.8 else 0, draft=0.1, row=0.01)
    seconds, depths = play(Pace(K, chain, habit=habit), 256, lambda done: 0, draft=0.1, row=0.01)
    assert seconds < 1.03 * 256 * 1.02
    assert depths[40:].count(0) > 0.85 * len(depths[40:])


def test_good_rounds_are_not_paid_for_with_bad_ones():
    """Trees by what rounds bring in the long run beat trees that are each as fast as they can be by themselves."""

    def speed(by_itself, most=32):
        habit, tokens, seconds = Habit(most), 0.0, 0.0
        for sure in [0.98, 0.8] * 100:
            cost = RoundCost(RowLatency([1, 64], [1.0, 8.0]))
            pace = Pace(most, chain=False, cost=cost, habit=Habit(most) if by_itself else habit)
            (tree,) = pace.cut([Draft(torch.arange(most), list(range(-1, most - 1)), None, [sure] * most)], 0.2)
            brought = 1 + sum(sure**depth for depth in range(1, len(tree) + 1))
            spent = 0.2 + float(cost(numpy.array([len(tree) + 1]))[0])
            habit.observe(habit.tried, habit.held, None, brought, spent)
            tokens, seconds = tokens + brought, seconds + spent
        return tokens / seconds

    assert speed(False) > 1.03 * speed(True)
