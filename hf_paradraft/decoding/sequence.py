"""The sequences of a call while they grow: each has its own processors, ends, and results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from sys import maxsize
from typing import Any

from torch import LongTensor, Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from ..names import treats_rows_alike
from ..protocol import Draft, Prefix, SequenceRound
from .accept import Emitted, accept


@dataclass
class Sequence:
    """One sequence being decoded.

    Attributes:
        ids: int64 `(1, limit + 1)`, its part of the call's buffer: padding, prompt, tokens so far,
            room.
        logits_processor: its own processors, to be called with only this sequence.
        length: the number of tokens so far, the prompt's padding included.
        padding: the number of padding tokens before the prompt.
        finished: whether it has ended.
        ended: the length of its text, if that has ended and padding follows while others go on, as
            in plain decoding; None before.
        asked: the length of the last prefix that the drafter was asked about, without padding.
        observed: the number of its tokens, without padding, that the drafter has been shown with
            their features.
        scores, logits: `(1, V)` for each new token, if the caller asks for them.
        draft: the draft that is verified in this round; None before the first one.
        outcome: its part of the last round; None for a sequence that had ended before.
        context: the number of positions that the target has.
        call: the call that it belongs to.
        row: its place in the call.
        place: its place in the target's forward.
        lookup: the finder of tokens to copy (`hf_paradraft.copies`); None: nothing is copied.
        race: the scorer of its guesses in this round; None: nothing reordered them.
    """

    ids: LongTensor
    logits_processor: LogitsProcessorList
    length: int
    padding: int = 0
    finished: bool = False
    ended: int | None = None
    asked: int = 0
    observed: int = 0
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    draft: Draft | None = None
    outcome: SequenceRound | None = None
    context: int = maxsize
    call: Any = None  # decoding.call.Call
    row: int = 0
    place: int = 0
    lookup: Any = None
    race: Any = None  # rules.race.Race

    @property
    def space(self) -> int:
        """The number of tokens that fit before its own end and the end of the target's context."""
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
        """The tokens of its text that are new in the last round."""
        return self.outcome.emitted[: max(0, self.end - self.outcome.begin)]

    @property
    def end(self) -> int:
        """The length of its text so far, without padding after its end."""
        return self.length if self.ended is None else self.ended

    def end_at(self, length: int, begin: int) -> None:
        """Go back to `length` tokens, `begin` of which are the prompt's, and end there."""
        self.length, self.finished = length, True
        del self.scores[length - begin :], self.logits[length - begin :]
        if (outcome := self.outcome) is not None:
            del outcome.accepted[max(0, length - outcome.begin) :]
            outcome.num_read = min(outcome.num_read, max(0, length - outcome.begin - 1))


@dataclass
class Ends:
    """The conditions that end a sequence, and the outputs that are kept for each token.

    Attributes:
        limit: the most tokens, the prompt's included.
        tokens: the ids that end a text.
        criteria: the criteria that are asked after every token of a sequence, about only that one.
        pads: whether sequences end one by one, with padding after them; otherwise all go on until
            all are done.
        keep_scores, keep_logits: whether the caller wants scores or logits of every token.
        put: the function that gives a streamer every token, after the criteria, as in plain
            decoding.
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
        sequence: the sequence, which grows.
        logits: the target's logits `(at least N + 1, V)`, as for `accept`.
        choices: the most probable token of each row of `logits`, if only that decides.
        ends: the conditions that end the sequence.
    """
    outcome = sequence.outcome
    for emitted in accept(
        outcome.draft,
        logits,
        sequence.ids,
        outcome.begin,
        sequence.logits_processor,
        sequence.call.rule,
        choices,
        sequence.row,
    ):
        take(sequence, emitted, ends)
        if sequence.finished:
            return
        outcome.num_read = len(outcome.accepted)


def take(sequence: Sequence, emitted: Emitted, ends: Ends) -> None:
    """Append a new token to a sequence, and check whether that ends it.

    The sequence's buffer holds the token already.
    """
    outcome, draft = sequence.outcome, sequence.draft
    path = outcome.accepted
    outcome.judged += bool(draft.children(path[-1] if path else -1))
    if emitted.node is not None:
        path.append(emitted.node)
    outcome.emitted.append(emitted.token)
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

    transformers' own list inspects each one's signature at every token, which takes longer.
    """

    def __call__(self, input_ids: LongTensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Compute the processed scores `(B, V)` after ids `(B, n)`.

        Raises:
            ValueError: a processor returned scores of another shape.
        """
        given = scores.shape
        for processor in self:
            scores = processor(input_ids, scores)
        if scores.shape != given:
            raise ValueError(
                f"A logits processor made scores of shape {tuple(scores.shape)} for {tuple(given)}."
            )
        return scores


def processors_of_sequences(
    logits_processor: LogitsProcessorList, batch_size: int
) -> list[LogitsProcessorList]:
    """Copy the processors for each sequence, so that each copy has a memory of its own.

    A copy has its row's part of arguments that were set by row.

    In a batch, processors that may know its rows are left out: they are shown the whole batch
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
