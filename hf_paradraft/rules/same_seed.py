"""Sample and match: the text that plain decoding has with the same seed, from drafts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..decoding.accept import Rule, child_that_is
from ..protocol import Draft
from .noise import Noise
from .race import Odds, Race


class SameSeed(Rule):
    """A rule that accepts a drafted child if it is the token that plain decoding draws.

    It is exact for every draft, even one that knows the draw.
    """

    in_turn = True

    def begin(self, call: Any, vocab_size: int, generator: torch.Generator | None) -> None:
        """Implement `Rule.begin`."""
        self.noise = Noise(call.sequences, call.begin, vocab_size, generator)
        self.noise.start()

    def end(self) -> None:
        """Implement `Rule.end`."""
        self.noise.stop()

    def of_row(self, row: int) -> Rule:
        """Implement `Rule.of_row`."""
        return _OfRow(self, row)

    def race(self, row: int, length: int, processors: LogitsProcessorList, budget: Any) -> Race:
        """Implement `Rule.race`; the learned odds are kept with the budget."""
        budget.odds = budget.odds or Odds()
        return Race(self.noise, row, length, processors, budget.odds)

    def undisturbed(self) -> AbstractContextManager:
        """Implement `Rule.undisturbed`."""
        return self.noise.kept()

    def draw_together(self, scores: Tensor) -> list[int]:
        """Implement `Rule.draw_together`."""
        return self.noise.draw_together(scores.softmax(-1))


class _OfRow(Rule):
    """The rule of one sequence."""

    def __init__(self, whole: SameSeed, row: int):
        self.whole, self.row = whole, row

    def judge(self, draft: Draft, node: int, scores: Tensor) -> tuple[int, int | None]:
        return child_that_is(draft, node, self.whole.noise.draw(self.row, scores.softmax(-1)))
