"""The questions that making drafts asks of a drafter, so that those of several calls can be asked at once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import LongTensor, Tensor

from ..protocol import Draft, Drafting, Guess, Prefix
from ..protocol.guess import Extend
from .budget import Budget


@dataclass
class Propose:
    """Asks what follows each prefix.

    Attributes:
        prefixes: of the sequences.
    """

    prefixes: list[Prefix]

    def asked(self, drafting: Drafting) -> Sequence[Guess]:
        """Ask it."""
        return drafting.propose(self.prefixes)


@dataclass
class Read:
    """Asks what follows guessed tokens.

    Attributes:
        extend: reads them; of a guess.
        tokens, parents: of each sequence, as `extend` takes them.
    """

    extend: Extend
    tokens: list[LongTensor]
    parents: list[list[int]]

    def asked(self, drafting: Drafting) -> list[Tensor]:
        """Ask it."""
        return self.extend(self.tokens, self.parents)


@dataclass
class Size:
    """Asks how many nodes of each draft to verify: one number, for all are verified in one forward.

    Attributes:
        budget: knows.
        probabilities, draft_seconds: as `Budget.size` takes them.
    """

    budget: Budget
    probabilities: list[list[float]]
    draft_seconds: float | None

    def asked(self, drafting: Drafting) -> int:
        """Ask it."""
        return self.budget.size(self.probabilities, self.draft_seconds)


# In this order, with any number of `Read`s, and each only if it is needed; it ends with the drafts.
Question = Propose | Read | Size
Steps = Generator[Question, Any, list[Draft]]


def answered(steps: Steps, drafting: Drafting) -> list[Draft]:
    """Make drafts whose questions one call's drafting answers."""
    answer: Any = None
    while True:
        try:
            question = steps.send(answer)
        except StopIteration as end:
            return end.value
        answer = question.asked(drafting)
