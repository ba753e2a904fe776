"""Two greedy outputs that are not the same: where, and whether rounding can have decided it."""

import torch
from torch import LongTensor
from transformers import PreTrainedModel

STEPS = 8  # of rounding: errors add up over layers


def first_difference(one: list[int], other: list[int]) -> int:
    """Index of the first token that differs; the shorter one's length if it is the beginning of the longer one."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@torch.no_grad()
def gap(target: PreTrainedModel, text: LongTensor) -> tuple[float, float]:
    """How far apart the logits of the two most probable tokens behind `text`, int64 `(1, n)`, are.

    Returns:
        The gap, and the rounding step of the target's dtype at the size of these logits.
    """
    logits = target(text, logits_to_keep=1).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    return best - second, max(abs(best), abs(second)) * torch.finfo(target.dtype).eps


def explain(target: PreTrainedModel, prompt: LongTensor, plain: list[int], drafted: list[int]) -> str:
    """One clause about greedy outputs that differ, after looking at the two best logits where they part."""
    index = first_difference(plain, drafted)
    text = torch.cat([prompt, prompt.new_tensor([plain[:index]])], dim=1)
    apart, step = gap(target, text)
    clause = f"from token {index + 1} on, where the two best logits are {apart:.3g} apart"
    dtype = str(target.dtype).removeprefix("torch.")
    if apart <= STEPS * step:
        return f"{clause}: a near-tie, which rounding to {dtype} (steps of {step:.2g}) decided. In float32 they are equal"
    return f"{clause}, more than rounding to {dtype} (steps of {step:.2g}) explains: please report it"
