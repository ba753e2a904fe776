"""The sequences of a call while they grow: each has its own processors, ends, and results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from sys import maxsize
from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from ..names import pad_token_of, treats_rows_alike
from ..protocol import Draft, Prefix
from .accept import Emitted, Greedy, Rule, accept


@dataclass
class Accepted:
    """A sequence's part of a round, filled while it is judged.

    An error there leaves it as far as it went.

    Attributes:
        begin: its length before.
        path: the accepted nodes, from the root down.
        num_read: how many of them plain decoding would have read by now: all but the newest token,
            if that was drafted.
        judged: draft positions that were accepted or rejected.
        tokens: that it emitted, on the host; those after its end are not the text's.
    """

    begin: int
    path: list[int] = field(default_factory=list)
    num_read: int = 0
    judged: int = 0
    tokens: list[int] = field(default_factory=list)


@dataclass
class Sequence:
    """One sequence being decoded.

    Attributes:
        ids: int64 `(1, limit + 1)`, its part of the call's buffer: padding, prompt, tokens so far,
            room.
        logits_processor: its own, to be called with this sequence alone.
        length: tokens so far, the prompt's padding included.
        padding: tokens before the prompt.
        rule: of acceptance.
        finished: whether it has ended.
        ended: its length, where it has ended and goes on with padding while others go on, as in
            plain decoding; None before.
        asked: tokens of the last prefix that the drafter was asked about, without padding.
        observed: its tokens before this one have been shown to the drafter with their features,
            without padding.
        scores, logits: `(1, V)` float32 for each new token, where they are asked for.
        draft: that is verified in this round; None before the first one.
        accepted: what came of it; None for a sequence that had ended before.
        context: positions that the target has.
        call: whose sequence it is.
        row: its place there.
        place: its place in the target's forward.
        race: that its draft of this round was made by; None: the noise is not known.
    """

    ids: LongTensor
    logits_processor: LogitsProcessorList
    length: int
    padding: int = 0
    rule: Rule = field(default_factory=Greedy)
    finished: bool = False
    ended: int | None = None
    asked: int = 0
    observed: int = 0
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    draft: Draft | None = None
    accepted: Accepted | None = None
    context: int = maxsize
    call: Any = None  # decoding.call.Call
    row: int = 0
    place: int = 0
    race: Any = None  # rules.race.Race

    @property
    def space(self) -> int:
        """Tokens that may be verified before its own end and the end of the target's context."""
        return max(
            0, min(self.ids.shape[1] - self.length - 2, self.context - self.length + self.padding)
        )

    def prefix(self, depth: int) -> Prefix:
        """Make the sequence's prefix, with room for at most `depth` guessed tokens.

        There is no room if the sequence has ended.
        """
        over = self.finished or self.ended is not None
        return Prefix(
            self.ids[:, self.padding : self.length],
            0 if over else min(depth, self.space),
            self.asked,
        )

    @property
    def emitted(self) -> list[int]:
        """Tokens of its text that the last round brought."""
        return self.accepted.tokens[: self.end - self.accepted.begin]

    @property
    def end(self) -> int:
        """Tokens of its text so far, without padding after its end."""
        return self.length if self.ended is None else self.ended

    def end_at(self, length: int, begin: int) -> None:
        """Go back to `length` tokens, `begin` of which are the prompt's, and end there."""
        self.length, self.finished = length, True
        del self.scores[length - begin :], self.logits[length - begin :]
        if (accepted := self.accepted) is not None:
            del accepted.path[max(0, length - accepted.begin) :]
            accepted.num_read = min(accepted.num_read, max(0, length - accepted.begin - 1))


@dataclass
class Ends:
    """The conditions that end a sequence, and what is kept of each of its tokens.

    Attributes:
        limit: tokens at most.
        tokens: ids that end a text.
        criteria: of transformers' own, asked after every token of a sequence, about it alone.
        pads: whether sequences end one by one, with padding after them; otherwise all go on until
            all are done.
        keep_scores, keep_logits: what the caller wants back of every token.
        put: shows a streamer every token, as plain decoding does, after the criteria.
    """

    limit: int
    tokens: set[int]
    criteria: StoppingCriteriaList
    pads: bool
    keep_scores: bool = False
    keep_logits: bool = False
    put: Callable[[int], None] | None = None


def advance(sequence: Sequence, logits: Tensor, choices: list[int] | None, ends: Ends) -> None:
    """Take the drafted tokens that the target agrees with, and the target's own next token.

    A sequence that ends goes no further.

    Args:
        sequence: grows.
        logits: the target's, `(at least N + 1, V)`, as for `accept`.
        choices: the most probable token of each row of `logits`, where that alone decides.
        ends: when to stop.
    """
    draft, begin = sequence.draft, sequence.accepted.begin
    for emitted in accept(
        draft, logits, sequence.ids, begin, sequence.logits_processor, sequence.rule, choices
    ):
        take(sequence, emitted, ends)
        if sequence.finished:
            return
        sequence.accepted.num_read = len(sequence.accepted.path)


def take(sequence: Sequence, emitted: Emitted, ends: Ends) -> None:
    """Let a sequence grow by a new token, and see whether that ends it.

    The sequence's buffer holds the token already.
    """
    draft, accepted = sequence.draft, sequence.accepted
    path = accepted.path
    accepted.judged += bool(draft.children(path[-1] if path else -1))
    accepted.num_read = len(path)
    if emitted.node is not None:
        path.append(emitted.node)
    accepted.tokens.append(emitted.token)
    sequence.length += 1
    if ends.keep_scores:
        # a processor's own dtype
        scores = emitted.scores.float() if emitted.scores is emitted.logits else emitted.scores
        sequence.scores.append(scores.clone())
    if ends.keep_logits:
        sequence.logits.append(emitted.logits.float().clone())
    sequence.finished = sequence.length >= ends.limit or emitted.token in ends.tokens
    if ends.criteria:
        stop = ends.criteria(sequence.ids[:, : sequence.length], tuple(sequence.scores) or None)
        sequence.finished = bool(stop.all()) or sequence.finished
    if ends.put is not None:
        ends.put(emitted.token)


class Processors(LogitsProcessorList):
    """A list of processors that are run in order.

    transformers' own inspects each one's signature at every token, which takes longer.
    """

    def __call__(self, input_ids: LongTensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Compute the processed scores `(1, V)` after ids `(1, n)`."""
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


def processors_of_sequences(
    logits_processor: LogitsProcessorList, batch_size: int
) -> list[LogitsProcessorList]:
    """Make the processors of each sequence alone, with memories of their own.

    They have their own part of arguments that were set up by row.

    In a batch those that may know its rows are left out: they are shown all of it
    (`rules.in_step`).

    Raises:
        ValueError: one cannot be copied; the message names it.
    """
    if batch_size == 1:
        return [Processors(logits_processor)]
    copies = []
    for index in range(batch_size):
        copies.append(Processors(map(_copied, filter(treats_rows_alike, logits_processor))))
        for processor in copies[-1]:
            if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(
                processor.prompt_ignore_length, Tensor
            ):
                processor.prompt_ignore_length = processor.prompt_ignore_length[index : index + 1]
    return copies


def _copied(processor: Any) -> Any:
    try:
        return copy.deepcopy(processor)
    except Exception as error:  # whatever a foreign object raises that was not made to be copied
        raise ValueError(
            f"{type(processor).__name__} cannot be copied ({error}), and in a batch each sequence "
            "needs one of its own, for they go at their own pace: call generate once per prompt."
        ) from error


def collect(
    sequences: list[Sequence], buffer: LongTensor, generation_config: GenerationConfig
) -> tuple[LongTensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
    """Collect the ids of a call, and the scores and logits of its new tokens.

    Sequences that have no token there any more have zeros as scores.

    Returns:
        Ids `(B, longest)`, padded after sequences that ended early; then scores and logits,
        `(B, V)` per new token, or None where they are not kept.
    """
    ids = padded(
        sequences, buffer, max(sequence.length for sequence in sequences), generation_config
    )
    columns = []
    for tensors in (
        [sequence.scores for sequence in sequences],
        [sequence.logits for sequence in sequences],
    ):
        columns.append(by_step(tensors, max(map(len, tensors))) or None)
    return ids, *columns


def by_step(tensors: list[list[Tensor]], count: int) -> tuple[Tensor, ...]:
    """Stack each sequence's rows `(1, V)` by step: `(B, V)` for each of `count` tokens.

    After a sequence's end there are zeros.
    """
    if not count:
        return ()
    empty = torch.zeros_like(next(rows for rows in tensors if rows)[0])
    return tuple(
        torch.cat([rows[step] if step < len(rows) else empty for rows in tensors])
        for step in range(count)
    )


def padded(
    sequences: list[Sequence], buffer: LongTensor, length: int, generation_config: GenerationConfig
) -> LongTensor:
    """Copy the first `length` tokens of a call's buffer, padded as in plain decoding.

    Padding stands after sequences that have ended.
    """
    ids, pad_token = buffer[:, :length].clone(), pad_token_of(generation_config)
    for index, sequence in enumerate(sequences):
        if sequence.length < length and pad_token is not None:
            ids[index, sequence.length :] = pad_token
    return ids
