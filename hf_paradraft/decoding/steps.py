"""Drafting in steps: another is taken while it brings tokens faster than rounds do."""

from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median
from time import perf_counter

import torch

from ..protocol import Guess, GuessedLogits, Prefix
from ..trees.growing import ROOT
from .grow import Growing
from .pace import Pace

Check = Callable[[Sequence[Guess], list[Prefix]], list[Guess]]


def _decoded(guess: Guess) -> int:
    return guess.decoded if isinstance(guess, GuessedLogits) else 0


class Steps:
    """One call's steps beyond the first.

    Args:
        pace: tells what a round costs.
    """

    def __init__(self, pace: Pace):
        self.pace = pace
        self.seconds: deque[float] = deque(maxlen=9)
        self.gains: deque[float] = deque(maxlen=32)  # tokens of a row that a step brought, or times what was promised

    def further(self, guesses: list[Guess], prefixes: list[Prefix], begun: float, check: Check) -> list[Guess]:
        """Let a drafter that chooses its next tokens itself go on.

        Args:
            guesses: of the rows, after the first step.
            prefixes: of the rows.
            begun: when the round did.
            check: refuses what is no guess.
        """
        while True:
            promised = gain = 0.0
            rows, more = 0, []
            for guess, prefix in zip(guesses, prefixes, strict=True):
                further = guess.further if isinstance(guess, GuessedLogits) and guess.decoded < prefix.room else None
                more.append(further)
                if isinstance(guess, GuessedLogits) and guess.decoded:
                    reach = guess.logits[: guess.decoded].float().softmax(-1).amax(-1).cumprod(0).tolist()
                    rows += 1
                    promised += 1 + sum(reach)  # with the target's own token, which is certain
                    gain += reach[-1] if further is not None else 0.0
            step = next((further for further in more if further is not None), None)
            if step is None:
                break
            expected = gain * fmean(self.gains) if self.gains else gain
            spent = perf_counter() - begun
            if self.seconds and not self.pace.goes_on(expected, median(self.seconds), promised, spent, rows):
                break
            clock, before = perf_counter(), [_decoded(guess) for guess in guesses]
            guesses = check(step(), prefixes)
            self.seconds.append(perf_counter() - clock)
            if [_decoded(guess) for guess in guesses] == before:
                break
            self.gains += [_decoded(g) - had for g, had, open_ in zip(guesses, before, more, strict=True) if open_ is not None]
        return guesses

    def grow(self, growing: dict[int, Growing], num_rows: int, begun: float) -> None:
        """Let trees grow level by level, read by a head or by the drafter's own forwards.

        Under `rejection` nothing is decided by what a path promises: a tree that stopped for that would depend on what was drawn.

        Args:
            growing: by row.
            num_rows: of the batch.
            begun: when the round did.
        """
        for own in growing.values():
            own.look([ROOT])
        levels = max((own.prefix.room - 1 for own in growing.values()), default=0)
        extend = next((own.guess.extend for own in growing.values() if own.guess.extend is not None), None)
        promised = sum(own.tree.reach(own.tree.chosen) + 1 for own in growing.values())
        for _ in range(levels):
            wanted = {row: own.wanted() for row, own in growing.items()}
            reach = sum(own.tree.reach(wanted[row]) for row, own in growing.items())
            if not reach:
                break
            expected = reach * fmean([1.0, *self.gains])  # never nothing: a tree that was full of siblings may go deeper later
            spent = perf_counter() - begun
            if self.seconds and not self.pace.goes_on(expected, median(self.seconds), promised, spent, len(growing)):
                break
            clock = perf_counter()
            asked = [(torch.zeros(0, dtype=torch.long), list[int]())] * num_rows
            for row, own in growing.items():
                if own.guess.extend is None:
                    own.look(wanted[row])
                else:
                    asked[row] = own.asked(wanted[row])
            if extend is not None:
                read = extend([tokens for tokens, _ in asked], [parents for _, parents in asked])
                for row, (tokens, _) in enumerate(asked):
                    if len(tokens):
                        growing[row].learn(wanted[row], read[row][: len(tokens)])
            if self.gains:  # a call's first step may have to be compiled
                self.seconds.append(perf_counter() - clock)
            before, promised = promised, sum(own.tree.reach(own.tree.chosen) + 1 for own in growing.values())
            self.gains.append((promised - before) / reach)
