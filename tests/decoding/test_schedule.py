"""PEARL's speed on paper against the schedule played out, and what a call makes of it."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from hf_paradraft.pearl.schedule import MIN_WINDOWS, Line, OverlapSchedule, overlapped_rates


def plain_rates(right, draft, verify):
    """Tokens per second of drafting and verifying one after the other."""
    sizes = numpy.arange(1, len(right) + 1)
    return (1 + numpy.cumsum(numpy.cumprod(right))) / (draft(sizes) + verify(sizes + 1))


def played(right, draft, verify, rounds, generator, first):
    """Tokens per second of one window size, round by round, as the loop runs them."""
    size, ready = len(right), False
    tokens = seconds = 0.0
    for _ in range(rounds):
        # a window's first was the target's own token
        guesses = (generator.random(size) < right)[1 if ready else 0 :]
        if not ready and not first:
            guesses = guesses[:0]
        seconds += max(draft, verify if len(guesses) else verify / 2) + (
            draft if first and not ready else 0
        )
        wrong = numpy.nonzero(~guesses)[0]
        tokens += 1 + (int(wrong[0]) if len(wrong) else len(guesses))
        ready = not len(wrong) and bool(generator.random() < right[0])
    return tokens / seconds


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.floats(0.3, 0.98), min_size=2, max_size=6),
    st.floats(0.2, 3),
    st.booleans(),
    st.integers(0, 99),
)
def test_the_rate_on_paper_is_that_of_the_schedule(right, drafting, first, seed):
    right = numpy.array(right)
    rates = overlapped_rates(
        right,
        lambda sizes: drafting + 0 * sizes,
        lambda rows: numpy.where(rows == 1, 0.5, 1.0),
        first,
    )
    simulated = played(right, drafting, 1.0, 8_000, numpy.random.default_rng(seed), first)
    assert rates[-1] == pytest.approx(simulated, rel=0.07)


def test_rates_of_a_perfect_drafter():
    right = numpy.ones(5)
    draft, verify = (lambda sizes: 0.2 * sizes), (lambda rows: 1.0 + 0 * rows)
    assert overlapped_rates(right, draft, verify).tolist() == pytest.approx([1, 2, 3, 4, 5])
    assert plain_rates(right, draft, verify)[-1] == pytest.approx(6 / 2)


@pytest.mark.parametrize(("drafting", "first"), [(0.02, True), (0.3, True), (1.5, False)])
def test_drafting_first_pays_where_drafts_are_cheap(drafting, first):
    window, generator = OverlapSchedule(6), numpy.random.default_rng(0)
    window.judged = MIN_WINDOWS
    for _ in range(60):
        window.draft.observe(6, drafting)
        window.verify.observe(6, 1.0)
        for depth in range(6):
            window.observe_guess(depth, generator.random() < 0.7)
    window.size()
    assert window.drafts_first == first


def test_lines_learn_the_time_of_every_size():
    flat, proportional = Line(level=True), Line(level=False)
    sizes = numpy.array([1, 4, 8])
    assert flat(sizes).tolist() == [0, 0, 0]
    for line in (flat, proportional):
        for _ in range(5):
            line.observe(4, 2.0)
    assert flat(sizes).tolist() == pytest.approx([2, 2, 2])
    assert proportional(sizes).tolist() == pytest.approx([0.5, 2, 4])
    for line in (flat, proportional):
        for size in (1, 8, 4) * 30:
            line.observe(size, 1 + 0.5 * size)
        assert line(sizes).tolist() == pytest.approx([1.5, 3, 5], rel=0.15)


def test_the_window_is_the_ratio_of_speeds():
    """A drafter that is five times as fast as the target, and nearly always right, gets a window of
    five (PEARL, Table 5).
    """
    window = OverlapSchedule(12)
    assert window.size() == 12  # nothing is known
    window.judged = MIN_WINDOWS
    for _ in range(60):
        for size in (3, 6, 9):
            window.draft.observe(size, 0.02 * size)
            window.verify.observe(size, 0.1)
        for depth in range(12):
            window.observe_guess(depth, torch.rand(()).item() < 0.9)
    assert 4 <= window.size() <= 6
    for _ in range(200):  # one forward for the whole window
        for size in (3, 6, 9):
            window.draft.observe(size, 0.02)
    assert window.size() == 12


def test_a_window_grows_again_where_the_text_gets_easier():
    """Two guesses are always made, and what is not known of later ones is taken from those."""
    window = OverlapSchedule(8)
    generator = numpy.random.default_rng(0)
    measured = {}
    for right, rounds in ((0.15, 300), (0.97, 300)):
        for _ in range(rounds):
            size = window.size()
            window.judged += 1
            window.draft.observe(size, 0.06 + 0.02 * size)
            window.verify.observe(size, 0.1)
            for depth in range(size):
                window.observe_guess(depth, hit := generator.random() < right)
                if not hit:
                    break
            window.observe_round(True, 1.0, 0.1)
        window.judged = MIN_WINDOWS
        measured[right] = window.size()
    assert measured[0.15] == 2
    assert measured[0.97] >= 6


@pytest.mark.parametrize("overlapped", [1.2, 0.8])
def test_the_faster_way_is_taken(overlapped):
    window, taken = OverlapSchedule(4), []
    for _ in range(200):
        taken.append(window.turn())
        for _ in range(12):
            window.observe_round(taken[-1], overlapped if taken[-1] else 1.0, 1.0)
    assert taken[:4] == [True] * 2 + [False] * 2  # sixteen rounds at least
    assert taken.count(overlapped > 1) > 0.85 * len(taken)
    assert taken[20:].count(overlapped < 1) >= 2  # looked at again


@pytest.mark.parametrize(
    ("overlapped", "least"),
    [(0.7, 0.97), (0.85, 0.97), (0.95, 0.97), (1.0, 0.99), (1.2, 1.1), (1.5, 1.4)],
)
def test_luck_does_not_choose_the_way(overlapped, least):
    """Rounds bring very different numbers of tokens; still little is lost by looking, and a clear
    gain is found.
    """
    measured = []
    for seed in range(12):
        generator, window, seconds = numpy.random.default_rng(seed), OverlapSchedule(8), 0.0
        for _ in range(150):
            way = window.turn()
            for _ in range(20):
                spent = 1.0 / overlapped if way else 1.0
                window.observe_round(way, min(8, int(generator.geometric(0.2))), spent)
                seconds += spent
        measured.append(3000 / seconds)
    assert numpy.mean(measured) > least


# Tables 1 and 10: tokens per second of both, the best window (the rounded ratio), speculative
# decoding, PEARL
PAPER = {
    "CodeLlama 7B, 34B": (49.34, 18.58, 3, 1.76, 2.48),
    "CodeLlama 7B, 70B": (49.34, 9.20, 5, 3.03, 4.43),
    "Llama 2 7B, 70B": (49.94, 9.22, 5, 2.35, 3.29),
    "Llama 3.1 8B, 70B": (44.37, 9.00, 5, 2.60, 3.87),
    "DeepSeek 1.3B, 33B": (63.20, 17.37, 4, 2.32, 3.48),
    "DeepSeek 6.7B, 33B": (50.05, 17.37, 3, 1.94, 2.79),
}


@pytest.mark.parametrize("pair", PAPER)
def test_rates_are_those_that_the_pearl_paper_measured(pair):
    """What its plain speculative decoding reached says how often guesses are right; from that
    follows what PEARL reached.
    """
    small, large, window, speculative, pearl = PAPER[pair]
    draft, verify = (lambda sizes: sizes / small), (lambda rows: 1 / large + 0 * rows)
    right = brentq(
        lambda chance: (
            plain_rates(numpy.full(window, chance), draft, verify)[-1] / large - speculative
        ),
        0.01,
        1,
    )
    rates = overlapped_rates(numpy.full(12, right), draft, verify) / large
    assert rates[window - 1] == pytest.approx(pearl, rel=0.11)
    assert rates[window - 1] >= 0.94 * rates.max()
