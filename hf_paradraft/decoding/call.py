"""One call of `generate`: its sequences, and the parts that serve them in a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import LongTensor, Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.utils import logging

from ..names import BaseStreamer, pad_token_of
from ..protocol import (
    Draft,
    Drafter,
    Drafting,
    Observation,
    Prefix,
    Round,
    RoundStreamer,
    SequenceRound,
    SpeculationConfig,
    SpeculationStats,
)
from .accept import Emitted, child_that_is
from .budget import Budget
from .checks import changes_its_scale
from .drafts import DraftBuilder
from .features import Features
from .noise import Noise
from .questions import Steps
from .race import Race
from .sequence import Ends, Sequence, by_step, padded, take
from .verify import ChainVerifier, TreeVerifier

logger = logging.get_logger(__name__)
PIECE = 2048  # tokens of a prompt that are read at once for a drafter that reads features, unless the caller says otherwise


@dataclass
class Call:
    """One call: its sequences, and who does what for them.

    Attributes:
        buffer: int64 `(B, limit + 1)`, the sequences' tokens.
        sequences: one for each prompt.
        drafter: as it was passed.
        config: how it is used in this call.
        drafting: guesses.
        builder: makes drafts of guesses.
        budget_for: the budget of as many sequences as are verified together.
        verifier: runs the target.
        features: what the drafter reads of the target.
        noise: of the target's draws, where drafts may know it.
        only_argmax: whether the most probable tokens alone decide.
        ends: when sequences end.
        criteria: the caller's own, which may remember: asked about the whole batch, token after token, as plain decoding does.
        generation_config: of the call.
        streamer: gets the tokens as they are accepted, or rounds (`RoundStreamer`); for one sequence.
        stats: what happened so far.
        context: positions that the target has.
        drafts_first: whether the forward that reads the prompt may verify a draft.
        hands_back: whether the caller sees the cache again.
        begin: tokens of the prompts, padding included.
        judged: tokens of the batch that `criteria` have been asked about.
        done: what they said so far, of each sequence.
        first: whether the forward that reads the prompt is still to come.
        races: of the sequences, that drafts of this round were made by.
        error: what ended it, in a batch of several calls, which go on.
        together: processors that may know the rows of the batch, with all others of the call; None: each sequence has its own.
    """

    buffer: LongTensor
    sequences: list[Sequence]
    drafter: Drafter
    config: SpeculationConfig
    drafting: Drafting
    builder: DraftBuilder
    budget_for: Callable[[int], Budget]
    verifier: ChainVerifier | TreeVerifier
    features: Features
    noise: Noise | None
    only_argmax: bool
    ends: Ends
    criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    streamer: BaseStreamer | None
    stats: SpeculationStats
    context: int
    drafts_first: bool
    hands_back: bool
    begin: int
    judged: int
    done: list[bool]
    first: bool = True
    races: list[Race] = field(default_factory=list)
    together: LogitsProcessorList | None = None
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return all(sequence.finished for sequence in self.sequences)

    def prefixes(self, depth: int) -> list[Prefix]:
        """Make the prefix of each sequence, with room for `depth` guessed tokens at most."""
        return [
            Prefix(
                sequence.ids[:, sequence.padding : sequence.length],
                0 if sequence.finished or sequence.ended is not None else min(depth, self.space(sequence)),
                sequence.asked,
            )
            for sequence in self.sequences
        ]

    def space(self, sequence: Sequence) -> int:
        """Count the tokens that may be verified in a sequence before its own end and the end of the target's context."""
        return max(0, min(self.ends.limit - sequence.length - 1, self.context - sequence.length + sequence.padding))

    @property
    def may_draft(self) -> bool:
        """Whether the next round can verify a draft. Features come with the first forward."""
        return self.verifier.may_draft and (not self.first or (self.drafts_first and not self.features.keys))

    @property
    def budget(self) -> Budget:
        """The budget, which decides how much to draft."""
        return self.builder.budget

    def rests(self) -> bool:
        """Decide whether the next round is a plain one because drafting would not pay; to be asked once a round."""
        return self.builder.may_rest and not self.first and self.budget.rest()

    def draft(self, rests: bool) -> Steps:
        """Give each sequence a draft; an empty one where nobody has room, or the round is a plain one (`rests`)."""
        self.builder.asked = False
        prefixes = self.prefixes(self.config.num_draft_tokens if self.may_draft and not rests else 0)
        drafts = [Draft.chain(self.buffer[0, :0])] * len(prefixes)
        if any(prefix.room for prefix in prefixes):
            # A compiled drafter reads K + 1 tokens, and more of them slowly: it is asked every time.
            spaces = None if self.config.compile else [self.space(sequence) for sequence in self.sequences]
            drafts = yield from self.shape(prefixes, self.verifier.branches and not self.first, spaces)
        for sequence, prefix, draft in zip(self.sequences, prefixes, drafts, strict=True):
            sequence.draft = draft if sequence.ended is None else self.padding(max(other.depth for other in drafts))
            if self.builder.asked:
                sequence.asked = prefix.ids.shape[1]
        return drafts

    def padding(self, count: int) -> Draft:
        """Make the draft of a sequence that has ended, and goes on beside others."""
        return Draft.chain(self.buffer.new_full((count,), pad_token_of(self.generation_config)))

    def shape(self, prefixes: list[Prefix], branches: bool, spaces: list[int] | None = None) -> Steps:
        """Make drafts of what the drafter guesses; arguments as for `DraftBuilder`."""
        processors = [sequence.logits_processor for sequence in self.sequences]
        if self.noise is not None:
            self.races = [
                Race(self.noise, index, prefix.ids.shape[1] + sequence.padding, processors[index], self.budget.odds)
                for index, (prefix, sequence) in enumerate(zip(prefixes, self.sequences, strict=True))
            ]
            prefixes = [replace(prefix, race=race) for prefix, race in zip(prefixes, self.races, strict=True)]
        return self.builder.steps(prefixes, processors, branches, spaces)

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
            drawn = None if self.noise is None else self.noise.draw_together(scores.softmax(-1))
            for index, sequence in enumerate(self.sequences):
                draft, node, here = sequence.draft, nodes[index], slice(index, index + 1)
                if sequence.ended is not None:
                    token, nodes[index] = child_that_is(draft, node, pad_token_of(self.generation_config))
                elif drawn is not None:
                    token, nodes[index] = child_that_is(draft, node, drawn[index])
                else:
                    token, nodes[index] = sequence.rule(draft, node, scores[here])
                sequence.ids[0, length] = token
                take(sequence, Emitted(token, nodes[index], raw[here], scores[here]), self.ends)
            self.stop()
            for sequence in self.sequences:
                if sequence.finished and sequence.ended is None:
                    sequence.ended = sequence.length
                sequence.finished = False
        for sequence in self.sequences:
            sequence.length, sequence.finished = sequence.end, True

    def observations(self, logits: list[Tensor | None], rows: list[int]) -> list[Observation | None]:
        """Make what the drafter is shown of the last forward.

        Args:
            logits: of the forward, `(N + 1, V)` for each sequence; None for one that had ended before.
            rows: where the sequences stood in it.
        """
        return [
            None if brought is None else self._observation(sequence, brought, row)
            for sequence, brought, row in zip(self.sequences, logits, rows, strict=True)
        ]

    def _observation(self, sequence: Sequence, logits: Tensor, row: int) -> Observation:
        prefix_rows, draft, accepted = self.verifier.prefix_rows[row], sequence.draft, sequence.accepted
        tokens = sequence.ids[0, accepted.begin : max(accepted.begin, sequence.length)]
        prompts = None
        if draft.prompt_rows is not None:
            end = accepted.path[-1] if accepted.path else -1
            below = [1 + len(draft) + index for index, node in enumerate(draft.prompt_rows.nodes) if node == end]
            prompts = logits[below].float() if below else None
        read = [*range(prefix_rows), *(prefix_rows + node for node in accepted.path[: accepted.num_read])]
        return self._show(sequence, tokens, accepted.begin - prefix_rows, row, read, prompts)

    def _show(
        self, sequence: Sequence, tokens: LongTensor, begin: int, row: int, read: list[int], prompts: Tensor | None = None
    ) -> Observation:
        """Make a sequence's observation of a forward whose first row stood at `begin`: these rows, but none twice."""
        begin -= sequence.padding
        skipped = max(0, sequence.observed - begin)  # padding, and what was read again
        sequence.observed = max(sequence.observed, begin + len(read))
        return Observation(tokens, begin + skipped, self.features.of_sequence(row, read[skipped:]), prompts)

    def read_piece(self) -> bool:
        """Read a piece of the prompt, where that is wanted in pieces, and show it to the drafter; False if the last is left."""
        piece = self.generation_config.prefill_chunk_size
        if piece is None and self.features.keys and not changes_its_scale(self.verifier.model):
            piece = PIECE
        if piece is None or not self.drafts_first or self.verifier.unread <= piece:
            return False
        self.verifier.read(self.buffer, piece)
        self.features.collect()
        begin = self.verifier.begin - self.verifier.unread - piece
        read = list(range(piece))
        self.drafting.observe(
            [self._show(sequence, sequence.ids[0, :0], begin, row, read) for row, sequence in enumerate(self.sequences)]
        )
        return True

    def record(self, record: Round) -> None:
        """Tell everyone what a round was."""
        for race, sequence in zip(self.races, self.sequences, strict=False):
            if sequence.accepted is not None and race.length == sequence.accepted.begin < sequence.end:
                race.learn(sequence.ids[0, race.length : sequence.end].tolist())
        self.races = []
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
        if self.hands_back and len(self.sequences) > 1 and isinstance(self.verifier, TreeVerifier):
            lengths = self.verifier.cache.lengths
            end = min(*lengths, max(self.begin, self.judged - 1)) if self.criteria else min(lengths)
            self.verifier.cache.forget([length - end for length in lengths])

    def finish(self) -> None:
        """Leave the cache as plain decoding does, where somebody will see it."""
        if self.hands_back:
            longest = max(sequence.length for sequence in self.sequences)
            self.verifier.finish(padded(self.sequences, self.buffer, longest, self.generation_config))
