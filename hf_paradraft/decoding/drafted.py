"""Calls that one drafter drafts for: where it can, it reads the texts of all of them in one forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..protocol import Round
from .call import Call
from .questions import Propose, Question, Read, Size


class DraftedTogether:
    """Calls whose sequences one `Drafting` holds.

    Args:
        call: the first one.

    Attributes:
        calls: their sequences are the drafting's, one call's behind the other's.
        drafting: that of the first one, which the others' have joined.
    """

    def __init__(self, call: Call):
        self.calls, self.drafting = [call], call.drafting

    def join(self, other: DraftedTogether) -> bool:
        """Take another one's calls behind these, and tell whether the drafter could."""
        alike = self.calls[0].budget_for(1) is other.calls[0].budget_for(1)
        joined = alike and self.drafting.join(other.drafting)
        if joined:
            self.calls += other.calls
        return joined

    def leave(self) -> None:
        """Let calls that are over go."""
        rows, begin = list[int](), 0
        for call in self.calls:
            rows += [] if call.finished else range(begin, begin + len(call.sequences))
            begin += len(call.sequences)
        self.calls = [call for call in self.calls if not call.finished]
        if rows and len(rows) < begin:
            self.drafting.select(rows)

    def draft(self) -> None:
        """Give every sequence a draft: what the calls ask next is asked at once, until all have their drafts."""
        rests = self.calls[0].rests()
        steps = [call.draft(rests) for call in self.calls]
        answers: dict[int, Any] = dict.fromkeys(range(len(steps)))
        questions: dict[int, Question] = {}
        while answers or questions:
            for index, answer in answers.items():
                with suppress(StopIteration):  # it has its drafts
                    questions[index] = steps[index].send(answer)
            proposing = {index: question for index, question in questions.items() if isinstance(question, Propose)}
            reading = {index: question for index, question in questions.items() if isinstance(question, Read)}
            sizing = {index: question for index, question in questions.items() if isinstance(question, Size)}
            if proposing:
                answers = self._propose(proposing)
            elif reading:
                answers = self._read(reading)
            else:
                answers = self._size(sizing)
            for index in answers:
                del questions[index]

    def observe(self, logits: Tensor, rows: Mapping[int, int]) -> None:
        """Show the drafter what the target's forward brought.

        Args:
            logits: `(B, N + 1, V)`.
            rows: where each sequence stood in it, by its `id`; one that had left stood nowhere.
        """
        observations = []
        for call in self.calls:
            read = [rows.get(id(sequence), 0) for sequence in call.sequences]
            brought = [
                None if sequence.accepted is None else logits[row] for sequence, row in zip(call.sequences, read, strict=True)
            ]
            observations += call.observations(brought, read)
        self.drafting.observe(observations)

    def reckon_with(self, num_rows: int) -> None:
        """Let the size of drafts be that which pays with so many sequences in the target's forward, rounded up to a power of
        two, so that few figures are learned."""
        budget = self.calls[0].budget_for(1 << (num_rows - 1).bit_length())
        if budget is not self.calls[0].budget:  # which may rest from what it learned of texts that are over
            budget.begin()
        for call in self.calls:
            call.builder.budget = budget

    def record(self, draft_seconds: float, verify_seconds: float, total_seconds: float, hidden_seconds: float) -> None:
        """Tell everyone what a round was; seconds as in `Round`."""
        whole = Round([], draft_seconds, verify_seconds, total_seconds, hidden_seconds, asked=False)
        for call in self.calls:
            if parts := call.parts():  # none of a call that is over and has not left
                own = replace(whole, sequences=parts, asked=call.builder.asked, reads_prompt=call.first)
                call.record(own)
                whole.sequences += parts
                whole.asked, whole.reads_prompt = whole.asked or own.asked, whole.reads_prompt or own.reads_prompt
        if whole.sequences:
            self.calls[0].budget.observe(whole)

    def _propose(self, questions: Mapping[int, Propose]) -> dict[int, Any]:
        """Ask what follows the texts of all calls: whoever wants no guess now is read along, for its text is there."""
        prefixes = []
        for index, call in enumerate(self.calls):
            if index in questions:
                prefixes += questions[index].prefixes
                continue
            prefixes += call.prefixes(0)
            for sequence in call.sequences:
                sequence.asked = sequence.length - sequence.padding
        with self._own_draws():
            guesses = self.drafting.propose(prefixes)
        return self._dealt(guesses, questions)

    def _size(self, questions: Mapping[int, Size]) -> dict[int, int]:
        """Ask how large the drafts of some calls should be."""
        probabilities = [chances for question in questions.values() for chances in question.probabilities]
        seconds = [question.draft_seconds for question in questions.values()]
        size = self.calls[0].budget.size(probabilities, None if None in seconds else max(seconds, default=None))
        return dict.fromkeys(questions, size)

    def _read(self, questions: Mapping[int, Read]) -> dict[int, Any]:
        """Ask what follows the guessed tokens of some calls."""
        tokens, parents = [], []
        for index, call in enumerate(self.calls):
            question = questions.get(index)
            nothing = [torch.zeros(0, dtype=torch.long, device="cpu")] * len(call.sequences)
            tokens += question.tokens if question is not None else nothing
            parents += question.parents if question is not None else [[] for _ in nothing]
        extend = next(iter(questions.values())).extend
        with self._own_draws():
            answers = extend(tokens, parents)
        return self._dealt(answers, questions)

    def _own_draws(self) -> ExitStack:
        """Let what a drafter draws (dropout, say) be none of the target's draws."""
        kept = ExitStack()
        for call in self.calls:
            if call.noise is not None:
                kept.enter_context(call.noise.kept())
        return kept

    def _dealt(self, answers: Sequence[Any], questions: Mapping[int, Question]) -> dict[int, Any]:
        """Deal answers for all sequences out to the calls that have asked."""
        if len(self.calls) == 1:  # which looks at them itself
            return {0: answers}
        dealt, begin = dict[int, Any](), 0
        for index, call in enumerate(self.calls):
            if index in questions:
                dealt[index] = answers[begin : begin + len(call.sequences)]
            begin += len(call.sequences)
        return dealt
