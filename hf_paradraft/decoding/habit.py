"""What calls tell the next: how often guesses were right, and whether drafting paid."""

from collections import defaultdict

import numpy

from .window import Window

GAIN = 1.05  # a change has to promise this much
DECAY = 0.98  # of a round's weight with each later round
HOPE = 4  # rounds that just pay are what a drafter begins with: one without a hit in its first rounds is not yet a bad one
MEMORY = 6  # rounds that earlier calls count for
MOST_GAIN = 1.5  # that is believed of earlier calls: text may change
FIRST_PAUSE, LONGEST_START = 8, 64  # plain rounds after a verdict against drafting; such that a call may begin with


class Habit:
    """What calls of one drafter for one target, with one size of drafts, tell the next.

    Args:
        num_draft_tokens: K, the most that is drafted.
        copied: the most that is copied for a round.
    """

    def __init__(self, num_draft_tokens: int, copied: int = 0) -> None:
        self.pause = FIRST_PAUSE  # the next call's first one
        self.tried = numpy.zeros(max(num_draft_tokens, copied) + 1)  # by depth, as in `Pace`
        self.held = numpy.zeros_like(self.tried)
        self.gains = numpy.zeros(2)  # decayed, of drafted rounds: how many, and their tokens per second in those of plain rounds
        # By how many rows went on, decayed, of drafted rounds: tokens of all of them, and seconds.
        self.brought: defaultdict[int, numpy.ndarray] = defaultdict(lambda: numpy.zeros(2))
        self.window = Window(num_draft_tokens)  # of overlapped rounds

    def known(self) -> tuple[float, float]:
        """For a new call: how many rounds the earlier ones count for, and their speed in that of plain rounds."""
        count, gain = self.gains.tolist()
        return (min(MEMORY, count), min(MOST_GAIN, gain / count)) if count >= HOPE else (HOPE, GAIN)

    def rate(self, tokens: float, seconds: float, rows: int = 1) -> float:
        """Tokens per second of drafted rounds in the long run, the next one included, which promises so many in all its rows.

        By it a round's further nodes and steps are judged, for all rounds together are to be fast: if each were made as fast as
        it can be by itself, the worst ones would get the most (the reward per time of a renewal process).
        """
        before, spent = self.brought[rows].tolist()
        return (before + tokens) / (spent + seconds)

    def observe(
        self, tried: numpy.ndarray, held: numpy.ndarray, gain: float | None, tokens: float, seconds: float, rows: int = 1
    ) -> None:
        """Learn from a drafted round.

        Args:
            tried, held: drafts by depth, of a row.
            gain: how much faster than a plain round it was, if known.
            tokens, seconds, rows: what it brought all rows that went on, how long it took, and how many they were.
        """
        self.tried, self.held = DECAY * self.tried + tried, DECAY * self.held + held
        self.brought[rows] = DECAY * self.brought[rows] + (tokens, seconds)
        if gain is not None:
            self.gains = DECAY * self.gains + (1, gain)

    def paid(self) -> None:
        """It did."""
        self.pause = FIRST_PAUSE

    def did_not_pay(self) -> None:
        """It did not: the next call looks only briefly, and then waits longer."""
        self.pause = min(2 * self.pause, LONGEST_START)
