"""A drafter in a process of its own: the same drafts, a process that never outlives what asked for
it.
"""

import gc
import itertools
import multiprocessing
import os
import signal
import sys
import threading

import pytest
import torch
from lossless import assert_lossless
from tiny import EOS, near_copy, tiny_model

import hf_paradraft
from hf_paradraft.decoding.budget import Budget
from hf_paradraft.pearl.process import ProcessDrafting
from hf_paradraft.pearl.schedule import OverlapSchedule
from hf_paradraft.pearl.worker import keep_to_last_cores

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("process")]
OPTIONS = {"max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": None}


class Angry(hf_paradraft.NgramDrafter):
    """Fails over there when asked the second time."""

    def start_drafting(self, target, max_length):
        drafting = super().start_drafting(target, max_length)
        whole, asked = drafting.propose, []

        def propose(prefixes):
            asked.append(1)
            if len(asked) > 1:
                raise OverflowError("too much of this")
            return whole(prefixes)

        drafting.propose = propose
        return drafting


@pytest.fixture(scope="module")
def target():
    return tiny_model()


@pytest.fixture(scope="module")
def process(target):
    """A process that is spawned, as users' are; `copied_processes` come sooner."""
    with hf_paradraft.ProcessDrafter(near_copy(target, 0.05), threads=1) as drafter:
        yield drafter


def prompts(batch_size, seed=0):
    return torch.randint(1, EOS, (batch_size, 9), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tree_size", [None, 6, "auto"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_process_drafts_what_its_drafter_would(
    target, process, tree_size, overlap, batch_size, monkeypatch
):
    # whatever the clock says
    monkeypatch.setattr(OverlapSchedule, "size", lambda schedule: schedule.most)
    ids = prompts(batch_size)
    config = hf_paradraft.SpeculationConfig(
        5, tree_size, overlap=overlap, never_slower=False, trace=True
    )
    options = {**OPTIONS, "attention_mask": torch.ones_like(ids)}
    for sampled in (False, True)[: 2 if batch_size == 1 else 1]:  # rows of a batch share the draws
        drafted, texts = [], []
        for drafter in (None, process.drafter, process):
            more = {} if drafter is None else {"assistant_model": drafter}
            if drafter is not None:
                drafter.speculation_config = config
            torch.manual_seed(3)
            texts.append(target.generate(ids, do_sample=sampled, **options, **more))
            # of the first round, a chain, the process sends what is in its tree
            if drafter is not None:
                drafted.append([record.drafted for record in drafter.last_stats.trace[batch_size:]])
        assert torch.equal(texts[0], texts[1])
        assert torch.equal(texts[0], texts[2])
        if tree_size != "auto" and not overlap:
            assert drafted[0] == drafted[1]
        assert any(map(len, drafted[1]))


@pytest.mark.parametrize("tree_size", [None, 6])
def test_calls_that_do_not_overlap_are_drafted_in_place(target, process, tree_size, monkeypatch):
    ways, there = itertools.cycle([True, False]), []
    monkeypatch.setattr(OverlapSchedule, "turn", lambda schedule: next(ways))
    monkeypatch.setattr(Budget, "rest", lambda budget: False)
    monkeypatch.setattr(
        Budget, "size", lambda budget, chances, seconds=None: max(map(len, chances), default=0)
    )
    propose = ProcessDrafting.propose
    monkeypatch.setattr(
        ProcessDrafting,
        "propose",
        lambda drafting, prefixes: there.append(1) or propose(drafting, prefixes),
    )
    config = hf_paradraft.SpeculationConfig(4, tree_size, overlap=True, trace=True)
    process.drafter.speculation_config = plain_config = hf_paradraft.SpeculationConfig(
        4, tree_size, never_slower=False, trace=True
    )
    ids = prompts(2)
    options = {**OPTIONS, "attention_mask": torch.ones_like(ids), "do_sample": False}
    plain = target.generate(ids, **options, assistant_model=process.drafter)
    drafted = [record.drafted for record in process.drafter.last_stats.trace]
    process.speculation_config = config
    for overlapped in (True, False, True, False):
        there.clear()
        assert_lossless(target, process, ids, plain=plain, **options)
        assert bool(there) == overlapped
        assert overlapped or [record.drafted for record in process.last_stats.trace] == drafted
    assert process.drafter.speculation_config is plain_config
    assert process.speculation_config is config


class Loading(hf_paradraft.NgramDrafter):
    """Sent as a recipe, which is not followed for every call."""

    loaded = 0

    def __reduce__(self):
        return Loading._load, ()

    @staticmethod
    def _load():
        Loading.loaded += 1
        return Loading()


def test_a_drafter_in_place_is_not_loaded_again(target):
    drafter = hf_paradraft.ProcessDrafter(Loading())
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, None)
    drafting = drafter.start_drafting(target, 40)
    assert Loading.loaded == 0
    assert drafting.propose([hf_paradraft.Prefix(torch.tensor([[1, 2, 3, 1]]), 2, 0)])[
        0
    ].tokens.tolist() == [2, 3]


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="processes are kept to cores on Linux only")
def test_the_first_one_keeps_to_cores_of_its_own(target, process):
    process.close()
    process.attach(target)
    cores = sorted(os.sched_getaffinity(0))
    assert os.sched_getaffinity(process.process.pid) == set(cores[-1:])
    with hf_paradraft.ProcessDrafter(hf_paradraft.NgramDrafter()) as second:
        second.attach(target)
        assert os.sched_getaffinity(second.process.pid) == set(cores)


def test_cores_that_cannot_be_chosen_stop_nothing(monkeypatch):
    def refuse(*args):
        raise PermissionError

    monkeypatch.setattr("os.sched_setaffinity", refuse, raising=False)
    keep_to_last_cores(1)


def test_calls_may_interleave_and_are_forgotten(target, process):
    process.attach(target)
    config = hf_paradraft.SpeculationConfig(4, None, never_slower=False)
    first, second = (ProcessDrafting(process, config, 40) for _ in range(2))
    ids, others = prompts(2)
    asked = [
        drafting.propose([hf_paradraft.Prefix(text[None], 4, 0)])[0]
        for drafting, text in ((first, ids), (second, others))
    ]
    longer = torch.cat([ids, asked[0].tokens[:1]])[None]
    again = first.propose([hf_paradraft.Prefix(longer, 4, len(ids))])[0]
    third = ProcessDrafting(process, config, 40)
    assert (
        again.tokens.tolist()
        == third.propose([hf_paradraft.Prefix(longer, 4, 0)])[0].tokens.tolist()
    )
    numbers = [first.call, second.call]
    del first, second
    gc.collect()
    assert set(numbers) <= set(process.ended)
    third.propose([hf_paradraft.Prefix(longer, 4, 0)])
    assert not process.ended
    with pytest.raises(KeyError):
        process.ask(process.process, numbers[0], "propose", [])


def test_a_workers_error_is_raised_here_and_ends_its_process(target, copied_processes):
    drafter = hf_paradraft.ProcessDrafter(Angry())
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        4, None, never_slower=False, overlap=True
    )
    ids = prompts(1)
    with pytest.raises(OverflowError, match="too much"):
        target.generate(ids, do_sample=False, assistant_model=drafter, **OPTIONS)
    process = drafter.process
    del drafter
    gc.collect()
    assert not process.is_alive()


def test_a_killed_process_is_said_and_another_is_started(target, copied_processes):
    ids = prompts(1)
    plain = target.generate(ids, do_sample=False, **OPTIONS)
    config = hf_paradraft.SpeculationConfig(6, None, never_slower=False, overlap=True)
    with hf_paradraft.ProcessDrafter(
        hf_paradraft.NgramDrafter(speculation_config=config)
    ) as drafter:
        assert_lossless(target, drafter, ids, plain=plain, **OPTIONS)
        os.kill(drafter.process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="process ended"):
            target.generate(ids, do_sample=False, assistant_model=drafter, **OPTIONS)
        assert_lossless(target, drafter, ids, plain=plain, **OPTIONS)
    assert not drafter.process.is_alive()


def test_drafters_that_cannot_leave_the_process_are_refused(target):
    class Local(hf_paradraft.NgramDrafter):
        pass

    with pytest.raises(ValueError, match="cannot be sent"):
        hf_paradraft.ProcessDrafter(Local()).attach(target)
    for style in ("eagle", "medusa"):
        with pytest.raises(ValueError, match="target's process"):
            hf_paradraft.ProcessDrafter(
                hf_paradraft.ParallelSpecDrafter.from_target(target, style)
            ).attach(target)


class Learns(hf_paradraft.NgramDrafter):
    """Says what it was told."""

    def start_drafting(self, target, max_length):
        return Told()


class Told(hf_paradraft.Drafting):
    told = ()

    def propose(self, prefixes):
        return [
            hf_paradraft.GuessedTokens(torch.tensor(self.told[-1:], dtype=torch.long))
            for _ in prefixes
        ]

    def observe(self, observations):
        self.told = [*self.told, *observations[0].tokens.tolist()]


def test_it_learns_what_the_target_brought(target, copied_processes):
    ids = prompts(1)
    with hf_paradraft.ProcessDrafter(Learns()) as drafter:
        drafter.speculation_config = hf_paradraft.SpeculationConfig(
            1, None, never_slower=False, trace=True
        )
        out = target.generate(ids, do_sample=False, assistant_model=drafter, **OPTIONS)[
            0, ids.shape[1] :
        ].tolist()
        end = 0
        for record in drafter.last_stats.trace[1:-1]:
            end += len(record.emitted)
            assert record.drafted == [out[end - len(record.emitted)]]


def test_several_calls_share_one_process_and_an_interrupt_ends_it(
    target, copied_processes, monkeypatch
):
    ids = prompts(1)
    plain, texts = target.generate(ids, do_sample=False, **OPTIONS), []
    others = len(multiprocessing.active_children())
    with hf_paradraft.ProcessDrafter(near_copy(target, 0.05), threads=1) as drafter:
        drafter.speculation_config = hf_paradraft.SpeculationConfig(
            4, None, never_slower=False, overlap=True
        )

        def call():
            texts.append(target.generate(ids, do_sample=False, assistant_model=drafter, **OPTIONS))

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(texts) == 3
        assert all(torch.equal(plain, text) for text in texts)
        assert len(multiprocessing.active_children()) == others + 1
        before = drafter.process

        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(type(drafter.connection), "recv", interrupted)
            with pytest.raises(KeyboardInterrupt):
                call()
        assert not before.is_alive()
        call()
        assert torch.equal(plain, texts[-1])


def test_a_calls_own_number_of_drafts(target, process):
    process.speculation_config = hf_paradraft.SpeculationConfig(
        4, None, overlap=True, never_slower=False
    )
    assert_lossless(target, process, prompts(1), **OPTIONS, num_assistant_tokens=2)
    assert process.speculation_config.num_draft_tokens == 4
