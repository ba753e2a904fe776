"""Sequences that one target decodes together: of one call, or of several that join and leave
between rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..protocol import Round, SequenceRound
from .call import Call
from .checks import changes_its_scale
from .group import Group
from .sequence import Sequence, advance
from .verify import Verifier

# tokens of a prompt that are read at once for a drafter that reads features, unless the caller says
# otherwise
PIECE = 8192


class Batch:
    """The sequences that are verified in one forward.

    A call of `generate` is a batch that no other call joins.

    Until it is closed, it collects the hidden states that drafters read, in forwards of the thread
    that made it.

    Args:
        call: the first call.
        group: the group of its sequences, which drafts for them.
        verifier: the verifier of all sequences, which runs the target.

    Attributes:
        calls: the sequences' calls; each has an acceptance rule, processors, criteria and ends of
            its own.
        groups: the groups of sequences that are drafted for together.
        sequences: the sequences, by their place in the forward.
    """

    def __init__(self, call: Call, group: Group, verifier: Verifier):
        self.calls, self.groups, self.verifier = [call], [group], verifier
        self.sequences: list[Sequence] = list(call.sequences)
        group.features.start()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, error: Any, *_: Any) -> None:
        """Close the batch; after an exception the caller's cache has rows of one length."""
        self.close()
        for call in self.calls if error is not None else ():
            call.break_off(self.verifier)

    def close(self) -> None:
        """End all calls, and stop collecting the target's hidden states."""
        for call in self.calls:
            call.end()
        for group in self.groups:
            group.features.stop()

    def read_piece(self) -> bool:
        """Read a piece of the only call's prompt, and show it to the drafter.

        Returns:
            Whether a piece was read; False where the next round reads all that is left.
        """
        [call], [group], verifier = self.calls, self.groups, self.verifier
        piece = call.generation_config.prefill_chunk_size
        if piece is None and group.features.keys and not changes_its_scale(verifier.model):
            piece = PIECE
        if piece is None or not call.drafts_first or verifier.unread <= piece:
            return False
        begins = verifier.cache.lengths
        verifier.read(call.buffer, piece)
        group.show_read(begins, [piece] * len(begins))
        return True

    def verify(self) -> tuple[Tensor, list[list[int]] | None]:
        """Run the target over all drafts, and keep the hidden states that drafters read.

        Returns:
            Logits `(B, N + 1, V)`, and each row's most probable token; None instead of these if no
            call is decided by them.
        """
        logits = self.verifier.verify(self.sequences)
        for group in self.groups:
            group.features.collect()
        choices = (
            logits.max(-1).indices.tolist()
            if any(call.only_argmax for call in self.calls)
            else None
        )
        if choices is None and logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # or its time would be counted as acceptance
        return logits, choices

    def accept(self, logits: Tensor, choices: list[list[int]] | None) -> None:
        """Judge every sequence's draft, and take its new tokens."""
        for sequence in self.sequences:
            new = SequenceRound(sequence.row, sequence.draft, begin=sequence.length)
            sequence.outcome = None if sequence.finished else new
        for call in self.calls:
            with self._for(call):
                if call.terms.in_step is not None:
                    call.terms.in_step(
                        call, [logits[sequence.place] for sequence in call.sequences]
                    )
                else:
                    for sequence in call.sequences:
                        if not sequence.finished:
                            decided = choices[sequence.place] if call.only_argmax else None
                            advance(sequence, logits[sequence.place], decided, call.ends)
                call.stop()

    @contextmanager
    def _for(self, call: Call) -> Iterator[None]:
        """End only the call in which an exception is raised.

        It may come from a processor, say, or from scores that nothing can be drawn from. In a batch
        of one call it is raised.
        """
        try:
            yield
        except Exception as error:
            if len(self.calls) == 1:
                raise
            call.error = error
            for sequence in call.sequences:
                sequence.finished = True

    def roll_back(self) -> None:
        """Drop rejected tokens from the cache."""
        outcomes = [sequence.outcome for sequence in self.sequences]
        self.verifier.keep(
            [[] if one is None else one.accepted[: one.num_read] for one in outcomes]
        )

    def observe(
        self,
        logits: Tensor,
        begun: float,
        draft_seconds: float,
        verify_seconds: float,
        hidden_seconds: float = 0.0,
    ) -> None:
        """Show drafters the forward's results, and record the round.

        Args:
            logits: the forward's logits.
            begun: the round's start time.
            draft_seconds, verify_seconds, hidden_seconds: as in `Round`.
        """
        for group in self.groups:
            group.observe(logits, self.verifier.prefix_rows)
        record = Round([], draft_seconds, verify_seconds, perf_counter() - begun, hidden_seconds)
        for group in self.groups:
            group.record(record)
