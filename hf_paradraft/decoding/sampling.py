"""Guessed logits as the target's own: in its ids, and through its warpers."""

import torch
from torch import LongTensor, Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

STATELESS = (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


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


def warp_row(ids: LongTensor, row: Tensor, logits_processor: LogitsProcessorList) -> Tensor:
    """Apply the processors without a memory to the logits `(1, V)` behind ids `(1, n)`.

    A draft may come from any distribution, but a processor that remembers its calls must see those of plain decoding alone.
    """
    for processor in logits_processor:
        if type(processor) in STATELESS:  # what is derived from one may remember
            row = processor(ids, row)
    return row


def warp(ids: LongTensor, logits: Tensor, logits_processor: LogitsProcessorList) -> Tensor:
    """Compute the distributions that a draft is drawn from, float32 `(K, V)`, from logits `(K, V)`, all behind ids `(1, n)`."""
    # One by one: a processor may know how many texts there are.
    return torch.cat([warp_row(ids, row, logits_processor) for row in logits.float().split(1)]).softmax(-1)


def sequential_choice(
    logits: Tensor,
    ids: LongTensor,
    logits_processor: LogitsProcessorList,
    do_sample: bool,
    generator: torch.Generator | None = None,
) -> tuple[LongTensor, Tensor]:
    """Choose one token per row, each row warped as if the earlier choices were the text.

    Args:
        logits: `(K, V)`.
        ids: int64 `(1, n)`, the prefix.
        logits_processor: the target's.
        do_sample: draw from the processed distribution, or take its maximum.
        generator: of the draws; default: torch's own.

    Returns:
        Tokens int64 `(K,)` and the warped scores, float32 `(K, V)`.
    """
    rows = []
    length = ids.shape[1]
    for row in logits.float().split(1):
        row = warp_row(ids, row, logits_processor)
        token = torch.multinomial(row.softmax(-1), 1, generator=generator) if do_sample else row.argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], dim=1)
        rows.append(row)
    return ids[0, length:], torch.cat(rows)
