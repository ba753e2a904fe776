"""How often a round reads a tensor: on a GPU the host waits for each of them."""

import pytest
import torch
from tiny import near_copy, tiny_model

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
