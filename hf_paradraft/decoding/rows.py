"""The rows of a call while they grow, and their results side by side."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StoppingCriteriaList

from ..protocol import Draft
from .accept import Rule, accept


@dataclass
class Row:
    """One sequence being decoded.

    Attributes:
        ids: int64 `(1, limit + 1)`, its part of the call's buffer: padding, prompt, tokens so far, room.
        logits_processor: its own, to be called with this row alone.
        length: tokens so far, the prompt's padding included.
        padding: tokens before the prompt.
        finished: whether it has ended.
        asked: tokens of the last prefix that the drafter was asked about, without padding.
        observed: its tokens before this one have been shown to the drafter with their features, without padding.
        scores, logits: `(1, V)` float32 for each new token, where they are asked for.
    """

    ids: LongTensor
    logits_processor: LogitsProcessorList
    length: int
    padding: int = 0
    finished: bool = False
    asked: int = 0
    observed: int = 0
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


@dataclass
class Taken:
    """What a row got from a round.

    Attributes:
        begin: its length before.
        path: the accepted nodes, from the root down.
        kept: those of them whose entries stay in the cache: all but the newest token, if that was drafted.
        judged: draft positions that were accepted or rejected.
    """

    begin: int
    path: list[int]
    kept: list[int]
    judged: int


@dataclass
class Ends:
    """When a row ends.

    Attributes:
        limit: tokens at most.
        tokens: ids that end a text.
        criteria: all others, asked after every token.
        keep_scores, keep_logits: what the caller wants back of every token.
    """

    limit: int
    tokens: set[int]
    criteria: StoppingCriteriaList
    keep_scores: bool = False
    keep_logits: bool = False


def take(row: Row, draft: Draft, logits: Tensor, rule: Rule, choices: list[int] | None, ends: Ends) -> Taken:
    """Accept what the target agrees with, and its own next token; a row that ends goes no further.

    Args:
        row: grows.
        draft: of the row.
        logits: the target's, `(at least N + 1, V)`, as for `accept`.
        rule: of acceptance.
        choices: the most probable token of each row of `logits`, where that alone decides.
        ends: when to stop.
    """
    begin, judged = row.length, 0
    path: list[int] = []
    for emitted in accept(draft, logits, row.ids, begin, row.logits_processor, rule, choices):
        judged += bool(draft.children(path[-1] if path else -1))
        if emitted.node is not None:
            path.append(emitted.node)
        row.length += 1
        if ends.keep_scores:
            row.scores.append(emitted.scores.float().clone())
        if ends.keep_logits:
            row.logits.append(emitted.logits.float().clone())
        row.finished = row.length >= ends.limit or emitted.token in ends.tokens
        if ends.criteria:
            stop = ends.criteria(row.ids[:, : row.length], tuple(row.scores) or None)
            row.finished = bool(stop.all()) or row.finished
        if row.finished:
            break
    return Taken(begin, path, path[: row.length - begin - 1], judged)


class Processors(LogitsProcessorList):
    """One after the other. transformers' own list looks at every processor's signature at every token, which takes longer."""

    def __call__(self, input_ids: LongTensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Scores `(1, V)` behind ids `(1, n)`."""
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


def processors_of_rows(logits_processor: LogitsProcessorList, batch_size: int) -> list[LogitsProcessorList]:
    """The processors for each row alone: with memories of their own, and their own part of what was set up by row."""
    if batch_size == 1:
        return [Processors(logits_processor)]
    rows = []
    for row in range(batch_size):
        own = Processors(map(copy.deepcopy, logits_processor))
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
