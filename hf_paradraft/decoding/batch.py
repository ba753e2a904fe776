"""Sequences that one target decodes together: of one call, or of several that join and leave between rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from .call import Call
from .drafted import DraftedTogether
from .sequence import Accepted, Sequence, advance
from .verify import TreeVerifier


class Batch:
    """The sequences that are verified in one forward. A call of `generate` is a batch that nobody joins.

    Args:
        call: the first one.

    Attributes:
        calls: whose sequences these are; each has a drafter, an acceptance rule, processors, criteria and ends of its own.
        drafted: these calls, together where one forward of their drafter can serve several.
        rows: the sequences, by their place in the forward.
        verifier: of them all.
    """

    def __init__(self, call: Call):
        self.calls, self.verifier, self.drafted = [call], call.verifier, [DraftedTogether(call)]
        self.rows: list[Sequence] = list(call.sequences)

    def join(self, other: Batch) -> None:
        """Take another batch's sequences, which have read their prompts, behind these.

        Raises:
            ValueError: one of both cannot be joined (recurrent targets, static caches, a prompt that is not read yet).
        """
        if not isinstance(self.verifier, TreeVerifier) or not isinstance(other.verifier, TreeVerifier):
            raise ValueError(f"{type(self.verifier.model).__name__} is served one call at a time, as it is loaded here.")
        self.verifier.join(other.verifier)
        self.calls += other.calls
        self.rows += other.rows
        for calls in other.drafted:
            if not any(before.join(calls) for before in self.drafted):
                self.drafted.append(calls)
        for calls in self.drafted:
            calls.reckon_with(len(self.rows))
        for call in self.calls:
            call.verifier = self.verifier

    def leave(self) -> list[Call]:
        """Let sequences that have ended go, with what the cache holds of them; returns the calls that are over."""
        going_on = [row for row, sequence in enumerate(self.rows) if not sequence.finished]
        if going_on and len(going_on) < len(self.rows) and isinstance(self.verifier, TreeVerifier):
            self.verifier.select(going_on)
        for sequence in self.rows:
            if sequence.finished:
                sequence.accepted = None
        self.rows = [self.rows[row] for row in going_on]
        over = [call for call in self.calls if call.finished]
        self.calls = [call for call in self.calls if not call.finished]
        for calls in self.drafted if over else ():
            calls.leave()
        self.drafted = [calls for calls in self.drafted if calls.calls]
        for calls in self.drafted if over else ():
            calls.reckon_with(len(self.rows))
        return over

    def draft(self) -> None:
        """Give every sequence a draft."""
        for calls in self.drafted:
            calls.draft()

    def verify(self) -> tuple[Tensor, list[list[int]] | None]:
        """Run the target over all drafts; calls take from it what their drafters read.

        Returns:
            Logits `(B, N + 1, V)`, and the most probable tokens where those alone decide for somebody.
        """
        logits = self.verifier.verify(self.rows, [sequence.draft for sequence in self.rows])
        for call in self.calls:
            call.features.collect()
        choices = logits.max(-1).indices.tolist() if any(call.only_argmax for call in self.calls) else None
        if choices is None and logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # or its time would be counted elsewhere
        return logits, choices

    def accept(self, logits: Tensor, choices: list[list[int]] | None) -> None:
        """Let every sequence take what the target agrees with."""
        for sequence in self.rows:
            sequence.accepted = None if sequence.finished else Accepted(sequence.length)
        for call, row, sequence in self._open():
            if call.together is None:
                with self._for(call):
                    advance(sequence, logits[row], choices[row] if call.only_argmax else None, call.ends)
        places = {id(sequence): row for row, sequence in enumerate(self.rows)}
        for call in self.calls:
            with self._for(call):
                if call.together is not None:
                    call.advance_together([logits[places.get(id(sequence), 0)] for sequence in call.sequences])
                call.stop()

    @contextmanager
    def _for(self, call: Call) -> Iterator[None]:
        """Let what raises in one call (a processor, scores that nothing can be drawn from) end that one alone."""
        try:
            yield
        except Exception as error:
            if len(self.calls) == 1:
                raise
            call.error = error
            for sequence in call.sequences:
                sequence.finished = True

    def roll_back(self) -> None:
        """Drop what was not accepted from the cache."""
        accepted = [sequence.accepted for sequence in self.rows]
        self.verifier.keep([None if result is None else result.path[: result.num_read] for result in accepted])

    def tell(
        self, logits: Tensor, begun: float, draft_seconds: float, verify_seconds: float, hidden_seconds: float = 0.0
    ) -> None:
        """Show drafters what the forward brought, and record the round.

        Args:
            logits: of the forward.
            begun: when the round did.
            draft_seconds, verify_seconds, hidden_seconds: as in `Round`.
        """
        rows = {id(sequence): row for row, sequence in enumerate(self.rows)}
        for calls in self.drafted:
            calls.observe(logits, rows)
        for calls in self.drafted:
            calls.record(draft_seconds, verify_seconds, perf_counter() - begun, hidden_seconds)

    def _open(self) -> list[tuple[Call, int, Sequence]]:
        """List the call, the row in the forward and the sequence itself for each sequence that has not ended."""
        owners = {id(sequence): call for call in self.calls for sequence in call.sequences}
        return [(owners[id(sequence)], row, sequence) for row, sequence in enumerate(self.rows) if not sequence.finished]
