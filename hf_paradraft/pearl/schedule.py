"""PEARL's window: how far to guess while the target verifies, and whether to overlap at all, from
measurements.

The schedule has two states. A round that verifies a window brings its accepted tokens and one of
the target's own; if all were accepted, and that one was guessed, another window is ready. Any other
round is followed by one without: the paper's reads only the newest token, while a new window is
written; where drafting takes much less than verifying, it is faster to draft first and to verify
that draft, while the next one is made. So with the chance that a guess is right, and the seconds
of either side, the speed of both ways is known.
"""

from collections.abc import Callable
from math import hypot, inf, sqrt

import numpy
from numpy.typing import NDArray

Seconds = Callable[[NDArray], NDArray]

DECAY = 0.98  # of a round's weight with each later round
MIN_WINDOWS = 8  # windows that are judged before their size follows measurements
PROBE_EVERY = 64  # judged windows between two that are as long as they may be
# share of the best rate at which a larger window is taken, which needs a lucky guess less often
NEARLY_BEST = 0.98
MIN_ROUNDS = 16  # rounds that go one way, at least
WAY_DECAY = 0.998  # slower, where the two ways are compared: tokens of single rounds differ much
OVERLAP_SHARE = 0.25  # of the seconds, while it is not known whether overlapping is faster


def overlapped_rates(
    right: NDArray, draft: Seconds, verify: Seconds, drafts_first: bool = False
) -> NDArray:
    """Compute the tokens per second of drafting while verifying, by window size.

    With the chance `C_g` that all `g` guesses of a window are right, a round that verifies a window
    (its first guess was the target's own token) brings `(C_1 + … + C_g) / C_1` tokens and is
    followed by another with chance `C_g`; a round of only the newest token brings one, and is
    followed by a window with chance `C_1`; a round that drafts first brings `1 + C_1 + … + C_g`,
    and is followed by a window with chance `C_g·C_1`. Weighing both by how often they come gives
    the rate.

    Args:
        right: float64 `(K,)`, the chance that a guess is right if those before it were.
        draft: seconds of guessing so many tokens.
        verify: seconds of verifying so many rows and all else of a round.
        drafts_first: whether rounds without a window draft first.

    Returns:
        float64 `(K,)`, for windows of 1 … K tokens.
    """
    sizes = numpy.arange(1, len(right) + 1)
    whole, drafting = numpy.cumprod(right), draft(sizes)
    with_window = right[0] * numpy.maximum(drafting, verify(sizes))
    if drafts_first:
        seconds = whole * with_window + (1 - whole) * (
            drafting + numpy.maximum(drafting, verify(sizes + 1))
        )
    else:
        seconds = with_window + (1 - whole) * numpy.maximum(drafting, verify(sizes[:1]))
    return (numpy.cumsum(whole) + 1 - whole) / seconds


class Line:
    """A line through the seconds that were seen lately, by size.

    Until sizes differ, the line goes through `(0, 0)` or is level.

    Args:
        level: whether cost is taken not to depend on size until it is seen to.
    """

    def __init__(self, level: bool):
        self.level = level
        self.sums = numpy.zeros(5)  # decayed, of 1, x, y, x², xy

    def observe(self, size: int, seconds: float) -> None:
        """Learn from one measurement."""
        self.sums = DECAY * self.sums + (1, size, seconds, size * size, size * seconds)

    def __call__(self, sizes: NDArray) -> NDArray:
        """Compute the expected seconds for these sizes; zeros before anything was observed."""
        count, x, y, xx, xy = self.sums
        if count == 0:
            return numpy.zeros(len(sizes))
        x, y = x / count, y / count
        varied, both = xx / count - x * x, xy / count - x * y
        certainty = varied / (varied + 0.25)  # one size alone says nothing of others
        slope = certainty * max(0.0, both / varied) if certainty > 1e-9 else 0.0
        slope += 0.0 if self.level else (1 - certainty) * y / max(1.0, x)
        return numpy.maximum(y + slope * (sizes - x), y / 4)


class Way:
    """The tokens per second of overlapped or sequential rounds, and their standard error."""

    def __init__(self) -> None:
        # decayed, of 1, tokens, seconds, tokens², tokens · seconds, seconds²
        self.sums = numpy.zeros(6)

    def observe(self, tokens: float, seconds: float) -> None:
        """Learn from a round."""
        self.sums += (1, tokens, seconds, tokens * tokens, tokens * seconds, seconds * seconds)

    def rate_and_error(self) -> tuple[float, float]:
        """Compute tokens per second and their standard error, infinite without any round."""
        count, tokens, seconds, both, mixed, long = self.sums.tolist()
        if not seconds:
            return 0.0, inf
        rate = tokens / seconds
        # and one wrong by all of it
        errors = max(0.0, both - 2 * rate * mixed + rate * rate * long) + (tokens / count) ** 2
        return rate, sqrt(errors) / seconds


class OverlapSchedule:
    """The measured rates of a drafter and a target, overlapped and one after the other.

    Args:
        most: tokens of a window, at most.

    Attributes:
        drafts_first: whether rounds without a window draft first.
    """

    def __init__(self, most: int):
        self.most = most
        self.draft, self.verify = Line(level=False), Line(level=True)
        self.tried, self.accepted = numpy.zeros(most), numpy.zeros(most)
        self.judged, self.drafts_first = 0, False
        self.ways = {True: Way(), False: Way()}
        self.overlaps, self.left, self.fresh = True, MIN_ROUNDS, True

    @property
    def right(self) -> NDArray:
        """The chance, by depth in a window, that a guess is right if all before it were.

        The chances are float64 `(most,)`. A depth that was not seen lately takes the chance of the
        one before it.
        """
        chances, before = numpy.empty(self.most), 0.5
        for depth, (accepted, tried) in enumerate(zip(self.accepted, self.tried, strict=True)):
            chances[depth] = before = (accepted + before) / (tried + 1)
        return chances

    def size(self) -> int:
        """Choose γ, the size of the next window, for the most tokens per second.

        γ, the number of tokens to guess, is the most that a window may have until enough was seen,
        and seldom later on, to see. With γ it is decided whether rounds without a window draft
        first.

        Two at least: of a window of one nothing is verified, and nothing would be learned any more.
        """
        if self.judged < MIN_WINDOWS or self.judged % PROBE_EVERY == 0:
            return self.most
        ways = [overlapped_rates(self.right, self.draft, self.verify, way) for way in (False, True)]
        self.drafts_first = bool(ways[1].max() > ways[0].max())
        rates = ways[self.drafts_first]
        return max(
            min(2, self.most), int(numpy.nonzero(rates >= NEARLY_BEST * rates.max())[0][-1]) + 1
        )

    def turn(self) -> bool:
        """Decide whether the next call drafts while verifying.

        A call does so where it is faster by more than chance, and sometimes to find out. A way that
        is not looked at any more is known less and less, and is looked at again. A call goes one
        way, for the drafter would have to read its text on both sides.
        """
        if self.left <= 0:
            (plain, error), (overlapped, other) = (
                self.ways[way].rate_and_error() for way in (False, True)
            )
            spent = {way: seen.sums[2] for way, seen in self.ways.items()}
            sure = abs(overlapped - plain) > hypot(error, other)
            overlaps = (
                overlapped > plain
                if sure
                else bool(spent[True] < OVERLAP_SHARE * sum(spent.values()))
            )
            self.overlaps, self.left = overlaps, MIN_ROUNDS
        self.fresh = True
        return self.overlaps

    def observe_guess(self, depth: int, right: bool) -> None:
        """Learn whether one guess of a window was right, where those before it were."""
        self.tried[depth] += 1
        self.accepted[depth] += right

    def observe_round(self, overlapped: bool, tokens: float, seconds: float) -> None:
        """Learn the tokens and seconds of a drafted round, except for a call's first round.

        A call's first round has no window yet.
        """
        self.left -= 1
        self.tried *= DECAY
        self.accepted *= DECAY
        for way in self.ways.values():
            way.sums *= WAY_DECAY
        if not self.fresh:
            self.ways[overlapped].observe(tokens, seconds)
        self.fresh = False
