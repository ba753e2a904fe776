"""A drafter's logits in the target's ids: a smaller vocabulary, or a padded one."""

import torch
from torch import LongTensor, Tensor


def cut(logits: Tensor, vocabulary: LongTensor | None, vocab_size: int) -> Tensor:
    """Logits `(…, V')` with what the target does not have left out, or made impossible where the drafter maps its ids."""
    if vocabulary is None:
        return logits[..., :vocab_size]
    if len(vocabulary) != logits.shape[-1]:
        raise ValueError(f"A drafter maps {len(vocabulary)} ids of its own, but its logits are for {logits.shape[-1]}.")
    outside = (vocabulary < 0) | (vocabulary >= vocab_size)
    return logits.masked_fill(outside.to(logits.device), -torch.inf)


def to_target(ids: LongTensor, vocabulary: LongTensor | None) -> LongTensor:
    """The target's ids of the drafter's."""
    return ids if vocabulary is None else vocabulary.to(ids.device)[ids]


def widen(logits: Tensor, vocabulary: LongTensor | None, vocab_size: int) -> Tensor:
    """Logits `(K, V)` float32 over the target's vocabulary; what the drafter does not have is impossible.

    Args:
        logits: `(K, V')`, from `cut`.
        vocabulary: int64 `(V',)`, or None where the first V' ids are the same.
        vocab_size: V.
    """
    wide = torch.full((len(logits), vocab_size), -torch.inf, device=logits.device)
    if vocabulary is None:
        wide[:, : logits.shape[-1]] = logits
        return wide
    inside = (vocabulary >= 0) & (vocabulary < vocab_size)
    places = vocabulary[inside].to(logits.device)
    wide[:, places] = logits[:, inside.to(logits.device)].float()
    return wide
