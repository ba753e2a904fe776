"""How often a round reads a tensor, for which the host waits on a GPU; and how many operations it
starts outside both models, each of which is a kernel there.
"""

import pytest
import torch
from tiny import near_copy, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import hf_paradraft
from hf_paradraft.decoding import loop

READS = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero")


def reads_of_rounds(monkeypatch, drafter, target, **options):
    """Count the reads of rounds that draft, once masks and inputs are set up."""
    counts, step = [0], loop.step

    def counted(read):
        def count(tensor, *args):
            counts[-1] += 1
            return read(tensor, *args)

        return count

    def run(batch):
        counts.append(0)
        step(batch)
        counts[-1] *= bool(batch.sequences[0].draft.parents)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "step", run)
        for name in READS:
            patched.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
        ids = torch.tensor([[1, 2, 3, 4, 5]])
        target.generate(
            ids,
            assistant_model=drafter,
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            **options,
        )
    return counts[4:]


@pytest.mark.parametrize("never_slower", [False, True])
@pytest.mark.parametrize("size", [None, 9, "auto"])
@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_a_round_reads_its_draft_and_its_verdict(monkeypatch, kind, size, never_slower):
    target = tiny_model()
    drafter = (
        near_copy(target, 0.02)
        if kind == "pard"
        else hf_paradraft.DFlashDrafter.from_target(target, 0, 1, 7, 2)
    )
    drafter.speculation_config = hf_paradraft.SpeculationConfig(5, size, never_slower=never_slower)
    reads = set(reads_of_rounds(monkeypatch, drafter, target))
    assert reads <= {0, 2}  # a round that rests, or has no room, drafts nothing
    assert never_slower or 2 in reads


class Counter(TorchDispatchMode):
    """Counts the operations outside models, views aside."""

    def __init__(self):
        super().__init__()
        self.count = self.depth = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += self.depth == 0 and not function.is_view
        return function(*args, **(kwargs or {}))

    def leave_out(self, part):
        def shift(by):
            self.depth += by

        part.register_forward_pre_hook(lambda *_: shift(1))
        part.register_forward_hook(lambda *_: shift(-1))


@pytest.mark.parametrize("size", [None, 8])
def test_a_round_starts_few_operations(monkeypatch, size):
    """transformers' assisted generation starts 263, counted in the same way."""
    target, counter, counts, step = tiny_model(), Counter(), [], loop.step
    drafter = near_copy(target, 0.02)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(5, size, never_slower=False)
    for model in (target, drafter):
        for part in (model.model, model.lm_head):
            counter.leave_out(part)

    def run(batch):
        before = counter.count
        with counter:
            step(batch)
        counts.append(counter.count - before)

    monkeypatch.setattr(loop, "step", run)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    target.generate(
        ids, assistant_model=drafter, max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    assert 10 < max(counts[8:]) <= 50  # the first rounds prepare inputs, and belong to the look
