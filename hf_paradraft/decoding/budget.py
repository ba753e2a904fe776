"""How much to draft, by one rule: another node, level, step, or the drafter's own forward is worth
it if it brings more tokens per second than rounds do in the long run, or than plain decoding does.

That is the reward per time of a renewal process: all rounds together are to be fast. If each were
made as fast as it can be by itself, the worst ones would get the largest trees.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy
from numpy import ndarray

from ..protocol import Round

DECAY = 0.98  # factor of a round's weight with each later one, in long-run rates and acceptance
RECENT_DECAY = 0.9  # likewise, in the estimate "does drafting still pay?"
# times plain decoding, assumed before a call's first rounds and weighed as one measured round
PRIOR_SPEEDUP = 1.1
PRIOR_SPREAD = 1.0  # likewise, the mean square of accepted tokens per plain round's time
LEAST_SPEEDUP = 0.98  # times plain decoding; below it drafting rests
# times plain decoding, by the latency table only: enough to draft before a plain round is timed
SURE_SPEEDUP = 2.0
LOSS = 0.01  # share of plain decoding's time that drafting may lose in the long run
# trees have 1 to 3 nodes, or 4 n - 1: a number of rows that is new may have to be compiled first
NODE_STEP = 4
# share of a round's tokens that a smaller draft may lose: the last nodes are overrated most
SPARED = 0.01


@dataclass
class RowLatency:
    """Measured latencies of a forward, by its number of new rows.

    Attributes:
        rows: the measured numbers of new rows, rising.
        seconds: the least time of each; other load on the machine only adds to it.
    """

    rows: list[int]
    seconds: list[float]

    def __call__(self, rows: numpy.ndarray | int) -> numpy.ndarray:
        """Compute the seconds of a forward of `rows`, by interpolation.

        Beyond the largest measured number the last slope goes on.
        """
        # Between the last two points; 0 for a single one. numpy's types know no diff of lists.
        slope = (numpy.diff(self.seconds[-2:]) / numpy.diff(self.rows[-2:])).sum()  # type: ignore[operator]
        beyond = numpy.maximum(0, rows - self.rows[-1])
        return numpy.interp(rows, self.rows, self.seconds) + max(0.0, slope) * beyond


class Recent(deque[float]):
    """The median of a figure's last nine values, which one disturbed round does not move."""

    def __init__(self, values: Iterable[float] = (), maxlen: int | None = 9, unseen: float = 0.0):
        super().__init__(values, maxlen)
        self.unseen = unseen

    def __deepcopy__(self, memo: Any) -> "Recent":
        """Copy in one step, since another thread's call may add a value meanwhile."""
        return Recent(tuple(self), self.maxlen, self.unseen)

    def __call__(self) -> float:
        """Return the median of the last values, or the initial value before any."""
        return float(median(self)) if self else self.unseen


class Budget:
    """Times and acceptance of one target and drafter at one batch size, over all their calls.

    Numbers of tokens are per sequence.

    Args:
        latency: seconds of the target's forward by its query rows.
        depth: the most tokens in a row that a draft may have.
        batch_size: the number of sequences that are verified together.
        row_counts: the numbers of rows that a compiled forward may have; None: any.
    """

    def __init__(
        self,
        latency: RowLatency,
        depth: int,
        batch_size: int = 1,
        row_counts: Sequence[int] | None = None,
    ):
        self.latency, self.batch_size, self.row_counts = latency, batch_size, row_counts
        self.factor = Recent(unseen=1.0)  # seconds of verifying ÷ the table's
        self.draft = Recent(unseen=0.25 * float(latency(1)))  # seconds
        self.overhead = Recent()  # seconds of a round without drafting and verifying
        # seconds of plain rounds ÷ those that this model of the cost gives them
        self.plain = Recent(unseen=1.0)
        self.step = Recent()  # seconds of one more level of a growing tree
        # tokens that such levels brought ÷ those that were expected
        self.kept_promises = Recent([1.0], maxlen=33)
        # decayed, by depth from 1
        self.tried, self.accepted = numpy.zeros((2, depth + 1))
        self.expected, self.came_true = numpy.full((2, depth + 1), 2.0)  # likewise
        self.tokens = self.seconds = 0.0  # decayed, of drafted rounds
        self.odds: Any = (
            None  # rules.race.Odds, of the drafter's tokens, where the target's noise is known
        )
        # lately, tokens per second of drafted rounds
        self.pace = PRIOR_SPEEDUP / self.plain_seconds
        # likewise, accepted tokens squared: if they vary much, few rounds decide little; and the
        # number of rounds in both means
        self.spread, self.recent = PRIOR_SPREAD, 1.0
        self.debt = 0.0  # plain rounds whose time drafting has lost, and that are not paid back
        self.size_before = depth  # nodes of the last draft that was cut; K before any was
        self.drafted = False  # in the last round

    def for_batch(self, batch_size: int) -> "Budget":
        """Make the budget of another batch size, starting from this one's measurements.

        Whether drafting pays there is judged anew.
        """
        other = deepcopy(self)
        other.batch_size = batch_size
        other.tokens = other.seconds = other.debt = 0.0
        other._judge_anew()
        return other

    def begin(self) -> None:
        """Begin a call: judge anew whether drafting pays, unless it did not pay lately."""
        if self.gain >= LEAST_SPEEDUP:
            self._judge_anew()

    def _judge_anew(self) -> None:
        """Let the next few rounds decide whether drafting pays."""
        self.pace = min(max(self.gain, 1.0), PRIOR_SPEEDUP) / self.plain_seconds
        self.spread, self.recent = PRIOR_SPREAD, 1.0

    def cost(self, rows: ndarray | int) -> ndarray:
        """Compute the expected seconds to verify and accept `rows` query rows of each sequence.

        Drafting is not counted.
        """
        if self.row_counts is not None:
            rows = numpy.asarray(self.row_counts)[numpy.searchsorted(self.row_counts[:-1], rows)]
        return self.factor() * self.latency(self.batch_size * rows) + self.overhead()

    @property
    def plain_seconds(self) -> float:
        """Expected seconds of a round without a draft."""
        return self.plain() * float(self.cost(1))

    @property
    def gain(self) -> float:
        """The recent tokens per second of drafted rounds, divided by those of plain rounds."""
        return self.pace * self.plain_seconds

    @property
    def acceptance(self) -> ndarray:
        """The chance, by depth, that a drafted token is accepted if the one before it was."""
        return (self.accepted + 0.5) / (self.tried + 1)

    @property
    def calibration(self) -> ndarray:
        """The drafter's calibration by depth: accepted ÷ expected tokens."""
        return self.came_true / self.expected

    def rate(self, tokens: float, seconds: float) -> float:
        """Compute the tokens per second that further drafting must exceed.

        That is the higher of two rates: of drafted rounds in the long run, with this round's
        expected tokens and seconds, and of plain rounds.
        """
        return max((self.tokens + tokens) / (self.seconds + seconds), 1 / self.plain_seconds)

    def worth(
        self, tokens: float, seconds: float, round_tokens: float, round_seconds: float
    ) -> bool:
        """Tell whether further tokens are worth further seconds in a round.

        The round is expected to have `round_tokens` and `round_seconds` already.
        """
        return tokens > seconds * self.rate(round_tokens, round_seconds)

    @property
    def least(self) -> float:
        """The path probability below which a node lowers tokens per second.

        It is 0 before any round.
        """
        if not self.seconds:
            return 0.0
        once, twice = self.cost(
            numpy.array([1 + self.size_before, 1 + 2 * self.size_before])
        ).tolist()
        return 0.5 * (twice - once) / self.size_before * self.tokens / self.seconds

    def size(
        self, probabilities: Sequence[Sequence[float]], draft_seconds: float | None = None
    ) -> int:
        """Choose how many nodes of each draft to verify, one number for all drafts.

        The largest draft determines the time.

        Args:
            probabilities: the path probabilities of the nodes of each sequence that drafts, most
                useful first.
            draft_seconds: the seconds spent on drafting; default: the usual ones.
        """
        longest = max(map(len, probabilities), default=0)
        if longest == 0:
            return 0
        sizes = numpy.arange(1, longest + 1)
        tokens = numpy.ones(longest)
        for chances in probabilities:
            tokens += numpy.cumsum(numpy.pad(chances, (0, longest - len(chances)))) / len(
                probabilities
            )
        seconds = self.cost(1 + sizes) + (self.draft() if draft_seconds is None else draft_seconds)
        best = int((tokens / seconds).argmax())
        rate = self.rate(float(tokens[best]), float(seconds[best]))
        steps = (sizes < NODE_STEP) | ((sizes + 1) % NODE_STEP == 0) | (sizes == longest)
        worth = numpy.where(steps, tokens - rate * seconds, -numpy.inf)
        self.size_before = 1 + int((worth >= worth.max() - SPARED * tokens[best]).argmax())
        return self.size_before

    def rest(self) -> bool:
        """Decide whether the next round is a plain one, without drafts."""
        if len(self.plain) < 2 and self.overhead and self.gain < SURE_SPEEDUP:
            return True
        # with the gain's standard error
        if self.gain + (self.spread / self.recent / self.batch_size) ** 0.5 >= LEAST_SPEEDUP:
            return False
        if self.debt > 0:
            self.debt -= LOSS
            return True
        self._judge_anew()
        return False

    def observe(self, record: Round) -> None:
        """Learn from a round."""
        rows = max(len(part.draft.row_parents) for part in record.sequences)
        emitted = fmean(len(part.emitted) for part in record.sequences)
        before, self.drafted = self.drafted, rows > 0
        guessed = any(len(part.draft) for part in record.sequences)
        if guessed and record.asked:  # copies say nothing about the drafter
            self._judge(record)
        if record.reads_prompt:  # its times say nothing about other rounds
            return
        seconds = record.total_seconds - record.draft_seconds
        table = float(self.latency(self.batch_size * (1 + rows)))
        if rows == 0:
            # drafted rounds were just before, while the machine was as busy
            if before or len(self.plain) < 2:
                self.plain.append(seconds / float(self.cost(1)))
            else:
                self.factor.append(max(0.0, seconds / self.plain() - self.overhead()) / table)
            if not record.asked:
                return
        elif not before and not guessed:
            return  # only prompt rows: their guesses come with the next round
        else:
            self.factor.append(record.verify_seconds / table)
            self.overhead.append(seconds - record.verify_seconds)
        if record.asked:
            self.draft.append(record.draft_seconds)
        self.tokens = DECAY * self.tokens + emitted
        self.seconds = DECAY * self.seconds + record.total_seconds
        # By the usual seconds of such rounds, not by this one's: whatever else the machine does is
        # no loss of drafting.
        verifying = float(self.cost(1 + rows)) if rows else self.plain_seconds
        drafting = min(self.draft(), record.draft_seconds)
        plain = self.plain_seconds / (verifying + drafting)
        self.recent = RECENT_DECAY * self.recent + 1
        self.pace += (emitted / (verifying + drafting) - self.pace) / self.recent
        brought = fmean((len(part.emitted) - 1) ** 2 for part in record.sequences)
        self.spread += (brought * plain**2 - self.spread) / self.recent
        # after a plain round the drafter also reads the tokens that it missed: lost time, but not a
        # cost of later rounds
        if not before:
            drafting = record.draft_seconds
        self.debt = max(0.0, self.debt + (verifying + drafting) / self.plain_seconds - emitted)

    def _judge(self, record: Round) -> None:
        """Update the accepted and the expected tokens, by depth."""
        self.expected += (1 - DECAY) * (2.0 - self.expected)
        self.came_true += (1 - DECAY) * (2.0 - self.came_true)
        self.tried *= DECAY
        self.accepted *= DECAY
        calibration = self.calibration
        for part in record.sequences:
            for depth, node in enumerate(
                (-1, *part.accepted)[: min(part.judged, len(self.tried) - 1)], 1
            ):
                children = part.draft.children(node)
                right = depth <= len(part.accepted)
                self.tried[depth] += 1
                self.accepted[depth] += right
                if part.draft.acceptance is not None:
                    expected = sum(part.draft.acceptance[child] for child in children)
                    self.expected[depth] += expected / max(1e-6, float(calibration[depth]))
                    self.came_true[depth] += right
