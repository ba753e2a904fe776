"""The sequences of one drafter with one configuration: they are drafted for together, whichever
calls they belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import LongTensor, Tensor

from ..names import pad_token_of
from ..protocol import Draft, Drafting, Observation, Prefix, Round
from .budget import Budget
from .call import Call
from .drafts import DraftBuilder
from .features import Features
from .sequence import Sequence
from .verify import Verifier


class Group:
    """Sequences that one `Drafting` holds, in its order.

    Args:
        call: the first call.
        drafting: the drafter's side of the call, which guesses.
        builder: the maker of drafts from guesses.
        features: the collector of hidden states that the drafter reads.
        budget_for: the function that looks up the budget for a number of sequences.

    Attributes:
        calls: the sequences' calls, one call's sequences after another's.
    """

    def __init__(
        self,
        call: Call,
        drafting: Drafting,
        builder: DraftBuilder,
        features: Features,
        budget_for: Callable[[int], Budget],
    ):
        self.calls, self.sequences = [call], list(call.sequences)
        self.drafting, self.builder, self.features = drafting, builder, features
        self.budget_for = budget_for

    @property
    def budget(self) -> Budget:
        """The budget, which decides how much to draft."""
        return self.builder.budget

    def draft(self, verifier: Verifier) -> None:
        """Give each sequence a draft; in a plain round, or where none has room, an empty one."""
        first = verifier.reads_prompt
        rests = self.builder.may_rest and not first and self.budget.rest()
        # features come with the first forward, which may also read what no drafter can
        waits = first and (self.features.keys or not self.calls[0].drafts_first)
        config = self.builder.config
        drafts_now = not rests and not waits and verifier.may_draft(self.sequences)
        depth = config.num_draft_tokens if drafts_now else 0
        # a forward with more masks takes longer for each of several sequences
        if self.builder.is_free(config.tree_size) and len(self.sequences) > 1:
            depth = min(depth, self.budget.size_before + 1)
        prefixes = [sequence.prefix(depth) for sequence in self.sequences]
        if any(prefix.room for prefix in prefixes):
            # A compiled drafter reads K + 1 tokens, and more of them slowly: it is asked every
            # time.
            spaces = None if config.compile else [sequence.space for sequence in self.sequences]
            drafts = self.make_drafts(prefixes, verifier.branches and not first, spaces)
        else:
            drafts, self.builder.asked = [self.nothing] * len(prefixes), False
        deepest = max(draft.depth for draft in drafts)
        for sequence, prefix, draft in zip(self.sequences, prefixes, drafts, strict=True):
            if sequence.ended is not None:  # it goes on with padding, next to others
                pad_token = pad_token_of(sequence.call.generation_config)
                draft = Draft.chain(sequence.ids.new_full((deepest,), pad_token))
            sequence.draft = draft
            if self.builder.asked:
                sequence.asked = prefix.ids.shape[1]

    @property
    def nothing(self) -> Draft:
        """An empty draft, without a token."""
        return Draft.chain(self.sequences[0].ids[0, :0])

    def make_drafts(
        self, prefixes: list[Prefix], branches: bool, spaces: list[int] | None = None
    ) -> list[Draft]:
        """Make drafts of the drafter's guesses; arguments are as for `DraftBuilder`."""
        processors = [sequence.logits_processor for sequence in self.sequences]
        for sequence, prefix in zip(self.sequences, prefixes, strict=True):
            length = prefix.ids.shape[1] + sequence.padding
            prefix.race = sequence.race = sequence.call.rule.race(
                sequence.row, length, sequence.logits_processor, self.budget
            )
        self.builder.rules = [call.rule for call in self.calls]
        lookups = [sequence.lookup for sequence in self.sequences if sequence.lookup is not None]
        return self.builder(self.drafting, prefixes, processors, branches, spaces, lookups)

    def observe(self, logits: Tensor, prefix_rows: list[int]) -> None:
        """Show the drafter the results of the target's forward.

        Args:
            logits: the forward's logits, `(B, N + 1, V)`.
            prefix_rows: the verifier's `prefix_rows`, one number for each sequence of the batch.
        """
        observations = [
            None
            if sequence.outcome is None
            else self._observation(sequence, logits[sequence.place], prefix_rows[sequence.place])
            for sequence in self.sequences
        ]
        self.drafting.observe(observations)

    def _observation(self, sequence: Sequence, logits: Tensor, prefix_rows: int) -> Observation:
        draft, outcome = sequence.draft, sequence.outcome
        tokens = sequence.ids[0, outcome.begin : sequence.length]
        prompts = None
        if draft.prompt_rows is not None:
            end = outcome.accepted[-1] if outcome.accepted else -1
            below = [
                1 + len(draft) + index
                for index, node in enumerate(draft.prompt_rows.nodes)
                if node == end
            ]
            prompts = logits[below].float() if below else None
        read = [
            *range(prefix_rows),
            *(prefix_rows + node for node in outcome.accepted[: outcome.num_read]),
        ]
        return self.show(sequence, tokens, outcome.begin - prefix_rows, read, prompts)

    def show(
        self,
        sequence: Sequence,
        tokens: LongTensor,
        begin: int,
        read: list[int],
        prompts: Tensor | None = None,
    ) -> Observation:
        """Make a sequence's observation of these rows of a forward, but of none twice.

        The forward's first row stood at position `begin`.
        """
        begin -= sequence.padding
        skipped = max(0, sequence.observed - begin)  # padding, and tokens that were read again
        sequence.observed = max(sequence.observed, begin + len(read))
        return Observation(
            tokens,
            begin + skipped,
            self.features.of_sequence(sequence.place, read[skipped:]),
            prompts,
        )

    def show_read(self, begins: list[int], counts: list[int]) -> None:
        """Show the drafter the prompts' tokens that the last forward has read.

        Args:
            begins, counts: the first one's position and their number, by place.
        """
        self.features.collect()
        self.drafting.observe(
            [
                self.show(
                    sequence,
                    sequence.ids[0, :0],
                    begins[sequence.place],
                    [*range(counts[sequence.place])],
                )
                for sequence in self.sequences
            ]
        )

    def record(self, record: Round) -> None:
        """Record a round in its calls' statistics and in the budget.

        Args:
            record: the round's record, without its sequences.
        """
        whole = replace(record, sequences=[], asked=self.builder.asked)
        for call in self.calls:
            if parts := call.parts():  # none of a call that is over and has not left
                whole.sequences += parts
                whole.reads_prompt |= call.first
                call.record(replace(record, sequences=parts))
        if whole.sequences:
            self.budget.observe(whole)
