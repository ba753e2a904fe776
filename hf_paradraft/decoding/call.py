"""One call of `generate`: its sequences, and the parts that serve them in a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import GenerationConfig, StoppingCriteriaList

from ..names import BaseStreamer, pad_token_of
from ..protocol import (
    Drafter,
    Round,
    RoundStreamer,
    SequenceRound,
    SpeculationConfig,
    SpeculationStats,
)
from .accept import Greedy, Rule
from .budget import Budget, RowLatency
from .sequence import Ends, Sequence
from .verify import Verifier


def unshared_budget(drafter: Drafter, decides: bool, depth: int, *sizes: Any) -> Budget:
    """Make a budget for one call only, without measured latencies.

    Arguments are as for `hf_paradraft.admission.budget_of`, of which the depth counts.
    """
    return Budget(RowLatency([1], [1.0]), depth)


def stay(batch: Any) -> None:
    """Let all sequences stay in a batch until its end."""


@dataclass(frozen=True)
class Terms:
    """The terms on which a call is served, as `hf_paradraft.admission` makes them.

    Attributes:
        rule: the acceptance rule.
        copies: the finder of tokens to copy (`hf_paradraft.copies`); None: nothing is copied.
        in_step: the function that takes a batch's tokens step by step
            (`hf_paradraft.rules.in_step`); None: each sequence goes at its own pace.
        budget_of: the function that looks up the budget shared by calls of one kind.
        leave: the function that lets ended sequences leave the batch, between two rounds.
        generator: the generator of this call's draws only; None: torch's.
        read: the number of cached tokens of an earlier call that the drafter has read too; 0: none
            are known.
    """

    rule: Rule = field(default_factory=Greedy)
    copies: Any = None
    in_step: Any = None
    budget_of: Callable[..., Budget] = unshared_budget
    leave: Callable[[Any], Any] = stay
    generator: torch.Generator | None = None
    read: int = 0


@dataclass(eq=False)
class Call:
    """One call of `generate`: its sequences, and the parts that serve them.

    Attributes:
        buffer: int64 `(B, limit + 1)`, the sequences' tokens.
        sequences: the sequences, one for each prompt.
        drafter: the drafter as it was passed.
        config: the drafter's options in this call.
        terms: the terms on which the call is served.
        only_argmax: whether only the most probable tokens decide.
        ends: the conditions that end a sequence.
        criteria: the caller's own criteria, which may have a memory: asked about the whole batch,
            token after token, as plain decoding does.
        generation_config: the call's generation config.
        streamer: the receiver of tokens as they are accepted, or of rounds (`RoundStreamer`); for
            one sequence.
        stats: the statistics so far.
        drafts_first: whether the forward that reads the prompt may verify a draft.
        hands_back: whether the caller sees the cache again.
        begin: the length of the prompts, padding included.
        judged: the length of the batch that `criteria` were last asked about.
        done: whether they have stopped each sequence so far.
        first: whether its first round is still to come.
        error: the exception that ended this call in a batch whose other calls go on.
    """

    buffer: LongTensor
    sequences: list[Sequence]
    drafter: Drafter
    config: SpeculationConfig
    terms: Terms
    only_argmax: bool
    ends: Ends
    criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    streamer: BaseStreamer | None
    stats: SpeculationStats
    drafts_first: bool
    hands_back: bool
    begin: int
    first: bool = True
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.judged, self.done = self.begin, [False] * len(self.sequences)
        for row, sequence in enumerate(self.sequences):
            sequence.call, sequence.row, sequence.place = self, row, row

    @property
    def rule(self) -> Rule:
        """The acceptance rule."""
        return self.terms.rule

    def end(self) -> None:
        """End the rule, and drop references that keep the call alive; it may be called again."""
        self.rule.end()
        for sequence in self.sequences:
            sequence.call = sequence.race = None

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return all(sequence.finished for sequence in self.sequences)

    def stop(self) -> None:
        """Ask the caller's criteria about the batch as it was after each token.

        They are asked up to the length of the shortest sequence that goes on; a sequence that they
        stop is cut back to the length at which they did.
        """
        while self.criteria:
            open_ = [sequence.length for sequence in self.sequences if not sequence.finished]
            if self.judged >= min(open_ or [self.longest]):
                return
            self.judged += 1
            ids = self.padded(self.judged)
            count = self.judged - self.begin if self.ends.keep_scores else 0
            scores = by_step([sequence.scores for sequence in self.sequences], count)
            stops = self.criteria(ids, scores).tolist()
            self.done = [before or stop for before, stop in zip(self.done, stops, strict=True)]
            for sequence, done in zip(self.sequences, self.done, strict=True):
                # Without a token that ends texts, plain decoding goes on with all of them until all
                # are done.
                if (done if self.ends.pads else all(self.done)) and sequence.length >= self.judged:
                    sequence.end_at(self.judged, self.begin)

    def record(self, record: Round) -> None:
        """Record a round in the statistics, the odds of the draws and a round streamer."""
        for sequence in self.sequences:
            race, sequence.race = sequence.race, None
            outcome = sequence.outcome
            if race is not None and outcome is not None and race.length == outcome.begin:
                race.learn(sequence.emitted)
        self.stats.add(record, self.config.trace)
        if isinstance(self.streamer, RoundStreamer):
            for part in record.sequences:
                self.streamer.put_round(part.emitted, len(part.accepted))
        self.first = False

    def parts(self) -> list[SequenceRound]:
        """List each sequence's part of the last round, without sequences that had ended before."""
        return [
            replace(outcome, accepted=outcome.accepted[: len(emitted)], emitted=emitted)
            for sequence in self.sequences
            if (outcome := sequence.outcome) is not None and (emitted := sequence.emitted)
        ]

    def break_off(self, verifier: Verifier) -> None:
        """Crop every row of the caller's cache to one length after an exception.

        Plain decoding leaves a batch's cache like this. A cache that the caller does not see again
        stays as it is.
        """
        if self.hands_back and len(self.sequences) > 1:
            lengths = verifier.cache.lengths
            end = min(*lengths, max(self.begin, self.judged - 1)) if self.criteria else min(lengths)
            verifier.cache.forget([length - end for length in lengths])

    def finish(self, verifier: Verifier) -> None:
        """Leave the cache as plain decoding does, if the caller sees it again."""
        if self.hands_back:
            if self.criteria:  # they may have taken back tokens that were read
                cache = verifier.cache
                rows = zip(cache.lengths, self.sequences, strict=True)
                cache.forget([max(0, length - sequence.length) for length, sequence in rows])
            verifier.finish(self.padded(self.longest))

    @property
    def longest(self) -> int:
        """The length of the longest sequence."""
        return max(sequence.length for sequence in self.sequences)

    def padded(self, length: int) -> LongTensor:
        """Copy the first `length` tokens of the buffer, padded as in plain decoding.

        Padding stands after sequences that have ended.
        """
        ids, pad_token = self.buffer[:, :length].clone(), pad_token_of(self.generation_config)
        for index, sequence in enumerate(self.sequences):
            if sequence.length < length and pad_token is not None:
                ids[index, sequence.length :] = pad_token
        return ids


def by_step(tensors: list[list[Tensor]], count: int) -> tuple[Tensor, ...] | None:
    """Stack each sequence's rows `(1, V)` by step: `(B, V)` for each of `count` tokens.

    After a sequence's end there are zeros. None: there are no tokens.
    """
    if not count:
        return None
    empty = torch.zeros_like(next(rows for rows in tensors if rows)[0])
    return tuple(
        torch.cat([rows[step] if step < len(rows) else empty for rows in tensors])
        for step in range(count)
    )
