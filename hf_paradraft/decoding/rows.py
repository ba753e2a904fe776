"""The rows of a call while they grow, and their results side by side."""

import copy
from dataclasses import dataclass, field

import torch
from torch import LongTensor, Tensor
from transformers import GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from .accept import Emitted


@dataclass
class Row:
    """One sequence being decoded.

    Attributes:
        logits_processor: its own, to be called with this row alone.
        length: tokens so far, the prompt's padding included.
        finished: whether it has ended.
        scores, logits: `(1, V)` float32 for each new token, where they are asked for.
    """

    logits_processor: LogitsProcessorList
    length: int
    finished: bool = False
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def add(self, emitted: Emitted, keep_scores: bool, keep_logits: bool) -> None:
        """Count a new token, and remember what is asked for."""
        self.length += 1
        if keep_scores:
            self.scores.append(emitted.scores.float().clone())
        if keep_logits:
            self.logits.append(emitted.logits.float().clone())


def processors_of_rows(logits_processor: LogitsProcessorList, batch_size: int) -> list[LogitsProcessorList]:
    """The processors for each row alone: with memories of their own, and their own part of what was set up by row."""
    if batch_size == 1:
        return [logits_processor]
    rows = []
    for row in range(batch_size):
        own = LogitsProcessorList(map(copy.deepcopy, logits_processor))
        for processor in own:
            if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(processor.prompt_ignore_length, Tensor):
                processor.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        rows.append(own)
    return rows


def collect(
    rows: list[Row], buffer: LongTensor, generation_config: GenerationConfig
) -> tuple[LongTensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
    """Sequences `(B, longest row)`, with padding behind rows that ended early, then scores and logits, `(B, V)` per new token.

    Rows that have no token there any more have zeros as scores.
    """
    longest = max(row.length for row in rows)
    sequences = buffer[:, :longest].clone()
    for index, row in enumerate(rows):
        if row.length < longest and generation_config._pad_token_tensor is not None:
            sequences[index, row.length :] = generation_config._pad_token_tensor
    columns = []
    for per_row in ([row.scores for row in rows], [row.logits for row in rows]):
        steps = max(map(len, per_row))
        empty = torch.zeros_like(per_row[0][0]) if steps else None
        columns.append(tuple(torch.cat([own[t] if t < len(own) else empty for own in per_row]) for t in range(steps)) or None)
    return sequences, *columns
