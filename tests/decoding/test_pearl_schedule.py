"""The schedule of drafting while verifying: the paper's, and the faster of two ways."""

import threading

import pytest
import torch
from lossless import assert_lossless
from tiny import ARCHITECTURES, near_copy, tiny_model

import hf_paradraft
from hf_paradraft.decoding.budget import Budget
from hf_paradraft.pearl import loop as pearl
from hf_paradraft.pearl.schedule import OverlapSchedule

TARGETS = {name: tiny_model(name) for name in ARCHITECTURES}


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = threading.active_count(), torch.get_num_threads()
    yield
    assert (threading.active_count(), torch.get_num_threads()) == before


def rounds(drafter, target, prompt, new=40):
    target.generate(
        prompt, do_sample=False, max_new_tokens=new, eos_token_id=None, assistant_model=drafter
    )
    return drafter.last_stats


def test_the_schedule_with_a_perfect_drafter(prompt):
    """Every window passes, and its successor was written meanwhile: but for the first round, each
    brings a whole window.
    """
    target = TARGETS["llama"]
    drafter = hf_paradraft.AutoregressiveDrafter(tiny_model())
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        5, None, never_slower=False, overlap=True, trace=True
    )
    stats = rounds(drafter, target, prompt, 41)
    assert stats.emitted_per_round == [1, 5, 5, 5, 5, 5, 5, 5, 5]
    assert [len(record.drafted) for record in stats.trace[:4]] == [0, 4, 4, 4]
    assert stats.hidden_seconds > 0
    assert sum(record.hidden_seconds for record in stats.trace) == pytest.approx(
        stats.hidden_seconds
    )


def test_the_schedule_with_a_useless_drafter(prompt):
    """Nothing ever fits: every round is the target's own token, while the drafter writes another
    window in vain.
    """

    class Wrong(hf_paradraft.Drafter, hf_paradraft.Drafting):
        speculation_config = hf_paradraft.SpeculationConfig(
            4, None, never_slower=False, overlap=True
        )
        asked = 0

        def start_drafting(self, target, max_length):
            return self

        def propose(self, prefixes):
            self.asked += 1
            logits = [TARGETS["llama"](prefix.ids).logits[0, -1] for prefix in prefixes]
            return [
                hf_paradraft.GuessedTokens(row.argmin().expand(prefix.room).clone())
                for row, prefix in zip(logits, prefixes, strict=True)
            ]

    drafter = Wrong()
    stats = rounds(drafter, TARGETS["llama"], prompt, 20)
    assert stats.emitted_per_round == [1] * 20
    assert drafter.asked >= 18
    assert stats.num_drafted == 0


def test_without_overlap_nothing_is_hidden(prompt):
    drafter = near_copy(TARGETS["llama"])
    assert rounds(drafter, TARGETS["llama"], prompt).hidden_seconds == 0
    # never_slower, one device: the plain round
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, overlap=True)
    assert rounds(drafter, TARGETS["llama"], prompt).hidden_seconds == 0


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("tree_size", [None, 6])
def test_calls_take_the_way_that_was_measured_to_be_faster(tree_size, sampled, monkeypatch, prompt):
    """With a device of its own, time decides; what one way learns the other does not count."""
    monkeypatch.setattr(pearl, "device_of", lambda drafter: torch.device("meta"))
    target = tiny_model()
    drafter = hf_paradraft.AutoregressiveDrafter(near_copy(target, 0.03 if sampled else 0.0))
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        3, tree_size, overlap=True, trace=True
    )
    monkeypatch.setattr(Budget, "rest", lambda budget: False)
    monkeypatch.setattr(
        Budget, "size", lambda budget, chances, seconds=None: max(map(len, chances), default=0)
    )
    options = {"do_sample": sampled, "max_new_tokens": 90, "eos_token_id": None}
    ways = []
    observe = OverlapSchedule.observe_round
    monkeypatch.setattr(
        OverlapSchedule,
        "observe_round",
        lambda schedule, way, *more: (ways.append(way), observe(schedule, way, *more)),
    )
    for seed in range(3):
        before = len(ways)
        assert_lossless(target, drafter, prompt, seed=seed, **options)
        stats = drafter.last_stats
        # a round that reads a prompt does not count
        assert before < len(ways) < stats.num_rounds + before
        assert len(set(ways[before:])) == 1
        assert (stats.hidden_seconds > 0) == ways[-1]
        if not sampled:  # a copy whose cache is right is never wrong
            for record in stats.trace[:-2]:
                assert len(record.emitted) == len(record.accepted) + 1
                assert tree_size is not None or len(record.accepted) == len(record.drafted)
    assert set(ways) == {True, False}


def test_rounds_that_draft_first_are_right_behind_windows(prompt, monkeypatch):
    """A cheap drafter: rounds without a window draft before they verify, and the drafter goes on
    from there.
    """
    target = tiny_model()
    drafter = hf_paradraft.AutoregressiveDrafter(near_copy(target, 0.02))
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        4, None, overlap=True, never_slower=False, trace=True
    )
    monkeypatch.setattr(
        OverlapSchedule, "size", lambda window: setattr(window, "drafts_first", True) or window.most
    )
    plain = target.generate(prompt, do_sample=False, max_new_tokens=80, eos_token_id=None)
    out = target.generate(
        prompt, do_sample=False, max_new_tokens=80, eos_token_id=None, assistant_model=drafter
    )
    assert torch.equal(plain, out)
    trace = drafter.last_stats.trace
    assert all(record.drafted for record in trace[2:-2])
    # a window's first guess was the target's token; a fresh draft is whole
    assert {3, 4} <= {len(record.drafted) for record in trace}
    assert drafter.last_stats.hidden_seconds > 0
