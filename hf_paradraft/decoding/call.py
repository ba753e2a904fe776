"""One call of `generate`: its sequences, and the parts that serve them in a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..names import BaseStreamer, pad_token_of
from ..protocol import (
    Drafter,
    Round,
    RoundStreamer,
    SequenceRound,
    SpeculationConfig,
    SpeculationStats,
)
from .accept import Emitted, Rule, child_that_is
from .sequence import Ends, Sequence, by_step, padded, take
from .verify import Verifier


@dataclass(eq=False)
class Call:
    """One call: its sequences, and who does what for them.

    Attributes:
        buffer: int64 `(B, limit + 1)`, the sequences' tokens.
        sequences: one for each prompt.
        drafter: as it was passed.
        config: how it is used in this call.
        verifier: runs the target.
        vocab_size: V, of the target.
        rule: of acceptance.
        copies: finds tokens to copy (`hf_paradraft.copies`), or None.
        only_argmax: whether the most probable tokens alone decide.
        ends: when sequences end.
        criteria: the caller's own, which may remember: asked about the whole batch, token after token, as plain decoding does.
        generation_config: of the call.
        streamer: gets the tokens as they are accepted, or rounds (`RoundStreamer`); for one sequence.
        stats: what happened so far.
        drafts_first: whether the forward that reads the prompt may verify a draft.
        hands_back: whether the caller sees the cache again.
        begin: tokens of the prompts, padding included.
        judged: tokens of the batch that `criteria` have been asked about.
        done: what they said so far, of each sequence.
        first: whether the forward that reads the prompt is still to come.
        error: what ended it, in a batch of several calls, which go on.
        together: processors that may know the rows of the batch, with all others of the call; None: each sequence has its own.
    """

    buffer: LongTensor
    sequences: list[Sequence]
    drafter: Drafter
    config: SpeculationConfig
    verifier: Verifier
    vocab_size: int
    rule: Rule
    copies: Any
    only_argmax: bool
    ends: Ends
    criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    streamer: BaseStreamer | None
    stats: SpeculationStats
    drafts_first: bool
    hands_back: bool
    begin: int
    judged: int
    done: list[bool]
    first: bool = True
    together: LogitsProcessorList | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        for row, sequence in enumerate(self.sequences):
            sequence.call, sequence.row, sequence.place, sequence.rule = self, row, row, self.rule.of_row(row)

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
        """Ask the caller's criteria about the batch as it was after each token, as far as all sequences have got; one that they
        stop goes back to where it was then."""
        while self.criteria:
            open_ = [sequence.length for sequence in self.sequences if not sequence.finished]
            if self.judged >= min(open_ or [max(sequence.length for sequence in self.sequences)]):
                return
            self.judged += 1
            ids = padded(self.sequences, self.buffer, self.judged, self.generation_config)
            count = self.judged - self.begin if self.ends.keep_scores else 0
            scores = by_step([sequence.scores for sequence in self.sequences], count)
            stops = self.criteria(ids, scores or None)
            self.done = [before or stop for before, stop in zip(self.done, stops.tolist(), strict=True)]
            for sequence, done in zip(self.sequences, self.done, strict=True):
                # Without a token that ends texts, plain decoding goes on with all of them until all are done.
                if (done if self.ends.pads else all(self.done)) and sequence.length >= self.judged:
                    sequence.end_at(self.judged, self.begin)

    def advance_together(self, logits: list[Tensor]) -> None:
        """Take tokens step by step, all sequences at one length: processors see the batch as plain decoding shows it.

        So a round ends for all sequences with the first one whose draft is used up or rejected, and those that have ended go on
        with padding, until all have.

        Args:
            logits: the target's of each sequence, `(at least N + 1, V)`.
        """
        nodes: list[int | None] = [-1] * len(self.sequences)
        while any(sequence.ended is None for sequence in self.sequences):
            if None in nodes:
                return
            length = self.sequences[0].length
            for sequence in self.sequences:
                sequence.accepted.num_read = len(sequence.accepted.path)
            raw = torch.stack([read[node + 1] for read, node in zip(logits, nodes, strict=True)]).float()
            scores = self.together(padded(self.sequences, self.buffer, length, self.generation_config), raw)
            if scores.shape != raw.shape:
                raise ValueError(f"A logits processor made scores of shape {tuple(scores.shape)} for {tuple(raw.shape)}.")
            drawn = self.rule.draw_together(scores)
            for index, sequence in enumerate(self.sequences):
                draft, node, here = sequence.draft, nodes[index], slice(index, index + 1)
                if sequence.ended is not None:
                    token, nodes[index] = child_that_is(draft, node, pad_token_of(self.generation_config))
                elif drawn is not None:
                    token, nodes[index] = child_that_is(draft, node, drawn[index])
                else:
                    token, nodes[index] = sequence.rule.judge(draft, node, scores[here])
                sequence.ids[0, length] = token
                take(sequence, Emitted(token, nodes[index], raw[here], scores[here]), self.ends)
            self.stop()
            for sequence in self.sequences:
                if sequence.finished and sequence.ended is None:
                    sequence.ended = sequence.length
                sequence.finished = False
        for sequence in self.sequences:
            sequence.length, sequence.finished = sequence.end, True

    def record(self, record: Round) -> None:
        """Tell everyone what a round was."""
        for sequence in self.sequences:
            race, sequence.race = sequence.race, None
            if race is not None and sequence.accepted is not None and race.length == sequence.accepted.begin < sequence.end:
                race.learn(sequence.ids[0, race.length : sequence.end].tolist())
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
                sequence.accepted.path[: sequence.end - sequence.accepted.begin],
                sequence.ids[0, sequence.accepted.begin : sequence.end].tolist(),
                sequence.accepted.judged,
            )
            for index, sequence in enumerate(self.sequences)
            if sequence.accepted is not None and sequence.end > sequence.accepted.begin
        ]

    def break_off(self) -> None:
        """Leave the cache of a batch in which something raised even, as in plain decoding, where somebody may see it."""
        if self.hands_back and len(self.sequences) > 1:
            lengths = self.verifier.cache.lengths
            end = min(*lengths, max(self.begin, self.judged - 1)) if self.criteria else min(lengths)
            self.verifier.cache.forget([length - end for length in lengths])

    def finish(self) -> None:
        """Leave the cache as plain decoding does, where somebody will see it."""
        if self.hands_back:
            longest = max(sequence.length for sequence in self.sequences)
            self.verifier.finish(padded(self.sequences, self.buffer, longest, self.generation_config))
