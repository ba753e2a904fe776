"""Two greedy outputs that are not the same: where, and whether rounding can have decided it."""

import torch
from torch import LongTensor
from transformers import PreTrainedModel

STEPS = 8  # of rounding: errors add up over layers


def first_difference(ids: list[int], others: list[int]) -> int:
    """Find the index of the first token that differs between two outputs.

    It is the shorter one's length if the longer one begins with it.
    """
    return next(
        (i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b),
        min(len(ids), len(others)),
    )


@torch.no_grad()
def explain(
    target: PreTrainedModel, prompt: LongTensor, plain: list[int], drafted: list[int]
) -> str:
    """Describe where two greedy outputs part, and whether rounding can have decided it.

    The description is one clause; the two best logits at that place decide.
    """
    index = first_difference(plain, drafted)
    text = torch.cat([prompt, prompt.new_tensor([plain[:index]])], dim=1)
    best, second = target(text, logits_to_keep=1).logits[0, -1].float().topk(2).values.tolist()
    # of rounding, at the size of these logits
    step = max(abs(best), abs(second)) * torch.finfo(target.dtype).eps
    clause = f"from token {index + 1} on, where the two best logits are {best - second:.3g} apart"
    dtype = str(target.dtype).removeprefix("torch.")
    if best - second <= STEPS * step:
        return (
            f"{clause}: a near-tie, which rounding to {dtype} (steps of {step:.2g}) decided. In "
            "float32 they are equal"
        )
    return (
        f"{clause}, more than rounding to {dtype} (steps of {step:.2g}) explains: please report it"
    )
