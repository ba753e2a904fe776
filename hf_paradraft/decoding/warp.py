"""The target's warpers over guesses: `q` has to be the distribution that a draft was really drawn from."""

import torch
from torch import LongTensor, Tensor
from transformers import (
    LogitsProcessor,
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


def stateless(logits_processor: LogitsProcessorList) -> list[LogitsProcessor]:
    """Those without a memory: a draft may come from any distribution, but a processor that remembers its calls must see those of
    plain decoding alone."""
    return [processor for processor in logits_processor if isinstance(processor, STATELESS)]


def warp(ids: LongTensor, logits: Tensor, logits_processor: LogitsProcessorList) -> Tensor:
    """Distributions float32 `(K, V)` of logits `(K, V)`, all behind the ids `(1, n)`."""
    logits = logits.float()
    for warper in stateless(logits_processor):
        logits = warper(ids.expand(len(logits), -1), logits)
    return logits.softmax(-1)


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
    warpers = stateless(logits_processor)
    for row in logits.float().split(1):
        for warper in warpers:
            row = warper(ids, row)
        token = torch.multinomial(row.softmax(-1), 1, generator=generator) if do_sample else row.argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], dim=1)
        rows.append(row)
    return ids[0, length:], torch.cat(rows)
