"""Guessed logits and ids as the target's own: drafters may have fewer ids, more, or other ones."""

import torch
from torch import LongTensor, Tensor


def cut(logits: Tensor, vocabulary: LongTensor | None, vocab_size: int) -> Tensor:
    """Drop from logits `(…, V')` those of ids that the target lacks, or set them to -inf where the drafter maps its ids."""
    if vocabulary is None:
        return logits[..., :vocab_size]
    if len(vocabulary) != logits.shape[-1]:
        raise ValueError(f"A drafter maps {len(vocabulary)} ids of its own, but its logits are for {logits.shape[-1]}.")
    outside = (vocabulary < 0) | (vocabulary >= vocab_size)
    return logits.masked_fill(outside.to(logits.device), -torch.inf)


def to_target(ids: LongTensor, vocabulary: LongTensor | None) -> LongTensor:
    """Map the drafter's ids to the target's."""
    return ids if vocabulary is None else vocabulary.to(ids.device)[ids]


def widen(logits: Tensor, vocabulary: LongTensor | None, vocab_size: int) -> Tensor:
    """Make logits `(K, V)` float32 over the target's vocabulary; ids that the drafter does not have get -inf.

    Args:
        logits: `(K, V')`, from `cut`.
        vocabulary: int64 `(V',)`, or None where the first V' ids are the same.
        vocab_size: V.
    """
    wide = torch.full((len(logits), vocab_size), -torch.inf, dtype=torch.float32, device=logits.device)
    if vocabulary is None:
        wide[:, : logits.shape[-1]] = logits
        return wide
    inside = (vocabulary >= 0) & (vocabulary < vocab_size)
    wide[:, vocabulary[inside].to(logits.device)] = logits[:, inside.to(logits.device)].float()
    return wide
