"""A drafter in a process of its own: the same drafts, a process that never outlives what asked for it."""

import gc
import os
import signal

import pytest
import torch
from tiny import EOS, near_copy, tiny_model

import hf_paradraft as pd
from hf_paradraft.drafters.process import Begin, ProcessDrafting

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("process")]
OPTIONS = {"max_new_tokens": 40, "pad_token_id": 0}


class Angry(pd.NgramDrafter):
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
    with pd.ProcessDrafter(near_copy(target, 0.05), threads=1) as drafter:
        yield drafter


def prompts(batch_size, seed=0):
    return torch.randint(1, EOS, (batch_size, 9), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tree_size", [None, 6, "auto"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_equal_to_the_drafter_itself(target, process, tree_size, overlap, batch_size):
    ids = prompts(batch_size)
    process.speculation_config = pd.SpeculationConfig(5, tree_size, overlap=overlap, never_slower=False, trace=True)
    for options in ({"do_sample": False}, {"do_sample": True})[: 2 if batch_size == 1 else 1]:  # rows of a batch share the draws
        torch.manual_seed(3)
        plain = target.generate(ids, attention_mask=torch.ones_like(ids), **options, **OPTIONS)
        torch.manual_seed(3)
        out = target.generate(ids, attention_mask=torch.ones_like(ids), **options, **OPTIONS, assistant_model=process)
        assert torch.equal(plain, out)
    if tree_size != "auto" and batch_size == 1:
        drafted = [round.drafted for round in process.last_stats.trace[1:]]  # the first is a chain, cut from the tree over there
        own, own.speculation_config = process.drafter, process.speculation_config
        torch.manual_seed(3)
        target.generate(ids, attention_mask=torch.ones_like(ids), **options, **OPTIONS, assistant_model=own)
        assert [round.drafted for round in own.last_stats.trace[1:]] == drafted


def test_calls_may_interleave_and_are_forgotten(target, process):
    process.attach(target)
    config = pd.SpeculationConfig(4, None, never_slower=False)
    first, second = (ProcessDrafting(process, Begin(config, 40)) for _ in range(2))
    one, two = prompts(2)
    asked = [drafting.propose([pd.Prefix(ids[None], 4, 0)])[0] for drafting, ids in ((first, one), (second, two))]
    longer = torch.cat([one, asked[0].tokens[:1]])[None]
    again = first.propose([pd.Prefix(longer, 4, len(one))])[0]
    fresh = ProcessDrafting(process, Begin(config, 40)).propose([pd.Prefix(longer, 4, 0)])[0]
    assert again.tokens.tolist() == fresh.tokens.tolist()
    del first, second
    gc.collect()
    assert process.ended


def test_an_error_over_there_is_raised_here_and_the_process_ends(target):
    drafter = pd.ProcessDrafter(Angry())
    drafter.speculation_config = pd.SpeculationConfig(4, None, never_slower=False)
    ids = prompts(1)
    with pytest.raises(OverflowError, match="too much"):
        target.generate(ids, do_sample=False, eos_token_id=None, assistant_model=drafter, **OPTIONS)
    process = drafter.process
    del drafter
    gc.collect()
    assert not process.is_alive()


def test_a_killed_process_is_said_and_another_is_started(target):
    ids = prompts(1)
    plain = target.generate(ids, do_sample=False, **OPTIONS)
    with pd.ProcessDrafter(pd.NgramDrafter()) as drafter:
        assert torch.equal(plain, target.generate(ids, do_sample=False, assistant_model=drafter, **OPTIONS))
        os.kill(drafter.process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="process ended"):
            target.generate(ids, do_sample=False, assistant_model=drafter, **OPTIONS)
        assert torch.equal(plain, target.generate(ids, do_sample=False, assistant_model=drafter, **OPTIONS))
    assert not drafter.process.is_alive()


def test_what_cannot_work_over_there_is_refused(target):
    class Local(pd.NgramDrafter):
        pass

    with pytest.raises(ValueError, match="cannot be sent"):
        pd.ProcessDrafter(Local()).attach(target)
    with pytest.raises(ValueError, match="target's process"):
        pd.ProcessDrafter(pd.ParallelSpecDrafter.from_target(target, style="eagle")).attach(target)
