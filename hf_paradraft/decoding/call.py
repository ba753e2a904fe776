"""One call of `generate`: its sequences, and the parts that serve them in a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import LongTensor
from transformers import GenerationConfig, StoppingCriteriaList

from ..names import BaseStreamer
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
from .sequence import Ends, Sequence, by_step, padded
from .verify import Verifier


def unshared_budget(drafter: Drafter, decides: bool, *sizes: Any) -> Budget:
    """Make a budget that knows of no other call, and of no costs.

    Arguments are as for `hf_paradraft.admission.budget_of`.
    """
    return Budget(RowLatency([1], [1.0]), *sizes[:3])


def stay(batch: Any) -> None:
    """Let all sequences stay in a batch until its end."""


@dataclass(frozen=True)
class Terms:
    """The terms on which a call is served, as `hf_paradraft.admission` makes them.

    Attributes:
        rule: of acceptance.
        copies: finds tokens to copy (`hf_paradraft.copies`); None: nothing is copied.
        in_step: takes the tokens of a batch step by step (`hf_paradraft.rules.in_step`); None: each
            text goes at its own pace.
        budget_of: looks up what calls share of times and acceptance.
        leave: lets sequences that have ended leave the batch, between two rounds.
        generator: of the call's draws alone; None: torch's.
        read: tokens that the cache holds of a call before, which the drafter has read too; 0: none
            are known to be.
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
    """One call: its sequences, and who does what for them.

    Attributes:
        buffer: int64 `(B, limit + 1)`, the sequences' tokens.
        sequences: one for each prompt.
        drafter: as it was passed.
        config: how it is used in this call.
        verifier: runs the target.
        terms: on which it is served.
        only_argmax: whether the most probable tokens alone decide.
        ends: when sequences end.
        criteria: the caller's own, which may remember: asked about the whole batch, token after
            token, as plain decoding does.
        generation_config: of the call.
        streamer: gets the tokens as they are accepted, or rounds (`RoundStreamer`); for one
            sequence.
        stats: what happened so far.
        drafts_first: whether the forward that reads the prompt may verify a draft.
        hands_back: whether the caller sees the cache again.
        begin: tokens of the prompts, padding included.
        judged: tokens of the batch that `criteria` have been asked about.
        done: what they said so far, of each sequence.
        first: whether its first round is still to come.
        error: what ended it, in a batch of several calls, which go on.
    """

    buffer: LongTensor
    sequences: list[Sequence]
    drafter: Drafter
    config: SpeculationConfig
    verifier: Verifier
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
            sequence.rule = self.rule.of_row(row)

    @property
    def rule(self) -> Rule:
        """The rule of acceptance."""
        return self.terms.rule

    def end(self) -> None:
        """Let go of what would keep the call, and its cache, alive; it may be called again."""
        self.rule.end()
        for sequence in self.sequences:
            sequence.call = sequence.race = None

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return all(sequence.finished for sequence in self.sequences)

    def stop(self) -> None:
        """Ask the caller's criteria about the batch as it was after each token.

        They are asked as far as all sequences have got; one that they stop goes back to where it
        was then.
        """
        while self.criteria:
            open_ = [sequence.length for sequence in self.sequences if not sequence.finished]
            if self.judged >= min(open_ or [max(sequence.length for sequence in self.sequences)]):
                return
            self.judged += 1
            ids = padded(self.sequences, self.buffer, self.judged, self.generation_config)
            count = self.judged - self.begin if self.ends.keep_scores else 0
            scores = by_step([sequence.scores for sequence in self.sequences], count)
            stops = self.criteria(ids, scores or None)
            self.done = [
                before or stop for before, stop in zip(self.done, stops.tolist(), strict=True)
            ]
            for sequence, done in zip(self.sequences, self.done, strict=True):
                # Without a token that ends texts, plain decoding goes on with all of them until all
                # are done.
                if (done if self.ends.pads else all(self.done)) and sequence.length >= self.judged:
                    sequence.end_at(self.judged, self.begin)

    def record(self, record: Round) -> None:
        """Tell everyone what a round was."""
        for sequence in self.sequences:
            race, sequence.race = sequence.race, None
            if (
                race is not None
                and sequence.accepted is not None
                and race.length == sequence.accepted.begin
            ):
                race.learn(sequence.emitted)
        self.stats.add(record, self.config.trace)
        if isinstance(self.streamer, RoundStreamer):
            for part in record.sequences:
                self.streamer.put_round(part.emitted, len(part.accepted))
        self.first = False

    def parts(self) -> list[SequenceRound]:
        """List each sequence's part of the last round, without sequences that had ended before."""
        return [
            SequenceRound(
                index,
                sequence.draft,
                sequence.accepted.path[: len(sequence.emitted)],
                sequence.emitted,
                sequence.accepted.judged,
            )
            for index, sequence in enumerate(self.sequences)
            if sequence.accepted is not None and sequence.emitted
        ]

    def break_off(self) -> None:
        """Crop every row of the caller's cache to one length after an exception.

        Plain decoding leaves a batch's cache like this. A cache that the caller does not see again
        stays as it is.
        """
        if self.hands_back and len(self.sequences) > 1:
            lengths = self.verifier.cache.lengths
            end = min(*lengths, max(self.begin, self.judged - 1)) if self.criteria else min(lengths)
            self.verifier.cache.forget([length - end for length in lengths])

    def finish(self) -> None:
        """Leave the cache as plain decoding does, where it will be seen."""
        if self.hands_back:
            longest = max(sequence.length for sequence in self.sequences)
            self.verifier.finish(
                padded(self.sequences, self.buffer, longest, self.generation_config)
            )
