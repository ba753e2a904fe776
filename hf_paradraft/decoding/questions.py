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
    """A question to the drafter: which tokens follow each prefix?

    Attributes:
        prefixes: of the sequences.
    """

    prefixes: list[Prefix]

    def asked(self, drafting: Drafting) -> Sequence[Guess]:
        """Let the drafter guess behind each prefix."""
        return drafting.propose(self.prefixes)


@dataclass
class Read:
    """A question to the drafter: which tokens follow tokens that were guessed already?

    Attributes:
        extend: reads them; of a guess.
        tokens, parents: of each sequence, as `extend` takes them.
    """

    extend: Extend
    tokens: list[LongTensor]
    parents: list[list[int]]

    def asked(self, drafting: Drafting) -> list[Tensor]:
        """Let the drafter read the tokens and give logits behind each."""
        return self.extend(self.tokens, self.parents)


@dataclass
class Size:
    """A question to the budget: how many nodes of each draft to verify? One number, for all are verified in one forward.

    Attributes:
        budget: knows.
        probabilities, draft_seconds: as `Budget.size` takes them.
    """

    budget: Budget
    probabilities: list[list[float]]
    draft_seconds: float | None

    def asked(self, drafting: Drafting) -> int:
        """Let the budget choose the number of nodes."""
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
