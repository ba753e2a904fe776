"""How much to draft: measured as decoding goes, so that drafting is never slower than decoding without it.

A round with `k` drafted tokens brings `1 + S_1 + … + S_k` tokens, `S_d` being the chance that `d` drafts in a row are accepted,
and costs one draft and one verification. Both are measured; the most tokens per second wins, and `k = 0`, plain decoding, is
one of the choices.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy

from ..protocol import Draft
from ..protocol.config import MAX_TREE
from .cost import RoundCost
from .habit import DECAY, FIRST_PAUSE, GAIN, MEMORY, Habit

TRIAL = 4  # drafted rounds before anything is decided
MISSES = 2  # chains in a row without an accepted token are enough to decide
LOOK = 4  # drafts of a look whether drafting pays by now
LONGEST_REST = 8  # plain rounds after a drafter had no guess again and again, even if asking costs nothing
KNOWN = 4  # plain rounds that were timed tell what they cost
DOUBT = 1.5  # and this much, where what plain decoding costs is a guess and has to be measured first
STEP = 4  # trees have 1 to 3 nodes, or 4 n - 1: what computes some number of rows for the first time may compile it first
NEARLY = 0.01  # of a round's tokens: what a smaller tree may bring less, for the last nodes keep their promises least
SURELY = 0.5  # of the chance at which a node would just pay: below it, it is not followed
FADING = 0.9  # what earlier calls count for is so much less after each drafted round of this one


class Pace:
    """One call's decisions.

    Args:
        num_draft_tokens: K, the most that is drafted.
        chain: whether drafts are chains, which may be shortened; trees are drafted whole or not at all.
        cost: of a round by its rows, where the size of trees is free.
        adaptive: whether to decide anything; if not, K tokens are drafted in every round.
        habit: from earlier calls; default: none.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        chain: bool,
        cost: RoundCost | None = None,
        adaptive: bool = True,
        habit: Habit | None = None,
    ):
        self.num_draft_tokens, self.chain, self.cost, self.adaptive = num_draft_tokens, chain, cost, adaptive
        self.habit = habit or Habit(num_draft_tokens)
        self.plain: deque[float] = deque(maxlen=9)  # seconds of whole rounds
        self.draft: deque[float] = deque(maxlen=9)
        self.verify: deque[float] = deque(maxlen=9)
        self.other: deque[float] = deque(maxlen=9)
        self.rows: deque[int] = deque(maxlen=9)
        self.emitted: deque[float] = deque(maxlen=24)
        self.earlier, self.earlier_gain = self.habit.known()
        weight = 0.5 * MEMORY / max(MEMORY, float(self.habit.tried.max()))
        self.earlier_tried, self.earlier_held = weight * self.habit.tried, weight * self.habit.held
        self.tried, self.held = numpy.zeros_like(self.habit.tried), numpy.zeros_like(self.habit.held)
        self.hits, self.mass = (numpy.full_like(self.habit.tried, 2.0) for _ in range(2))
        self.rounds, self.misses, self.wait, self.pause = 0, 0, 0, self.habit.pause
        self.least = 0.0  # chance of a path below which a node surely brings tokens slower than rounds do, as of the last one
        self.nodes: deque[int] = deque([MAX_TREE // 2], maxlen=8)  # of trees that were worth verifying
        self.drafting = False  # in the last round
        self.empty, self.rests = 0, False  # times in a row that the drafter had no guess; whether it rests for that
        doubted = self.habit.pause > FIRST_PAUSE
        self.trial, self.looks = (1, True) if doubted else (TRIAL, False)  # drafted rounds to the next decision; are they a look?

    @property
    def accepted(self) -> numpy.ndarray:
        """By depth, the chance that a draft is accepted if the one before it was."""
        return (self.held + self.earlier_held + 0.5) / (self.tried + self.earlier_tried + 1)

    @property
    def factors(self) -> Any:
        """By depth, how many of the drafter's promises come true: accepted ÷ believed."""
        return self.hits / self.mass

    def depth(self) -> int:
        """How many tokens to draft in the next round; 0 for none."""
        if not self.adaptive:
            return self.num_draft_tokens
        if self.wait > 0:
            self.wait -= 1
            return 0
        if self.empty >= MISSES and not self.rests:
            self.wait, self.rests = min(self.empty, LONGEST_REST), True
            return 0
        if self.trial > 0 or not self.verify:
            return min(LOOK, self.num_draft_tokens) if self.looks and self.chain else self.num_draft_tokens
        if (best := self._best()) > 0:
            if len(self.emitted) >= TRIAL:
                self.habit.paid()
            return best
        if len(self.plain) < 2:
            return 0
        # Not worth it: decode plainly for a while, then look again, each time later.
        if self.pause == self.habit.pause:
            self.habit.did_not_pay()
        self._fade(0.0)
        self.wait, self.pause = self.pause, min(2 * self.pause, 256)
        self.trial, self.looks = 1, True
        return 0

    def _best(self) -> int:
        """The number of drafts that promises the most tokens per second; 0 where none beats plain decoding."""
        draft, verify, other, rows = (median(part) for part in (self.draft, self.verify, self.other, self.rows))
        # Until a plain round was timed, half a verification's time is its least.
        plain = (median if len(self.plain) > 2 else min)(self.plain) if self.plain else verify / 2
        if not self.chain:
            gain = sum(self.emitted) * plain / (draft + verify + other) + self.earlier * self.earlier_gain
            gain /= len(self.emitted) + self.earlier
            return self.num_draft_tokens if gain * self._credit >= 1 else 0
        depths = numpy.arange(1, self.num_draft_tokens + 1)
        tokens = 1 + numpy.cumsum(numpy.cumprod(self.accepted[depths]))
        slope = max(0.0, (verify - plain) / max(1, rows - 1))
        seconds = draft + other + verify - slope * (rows - 1) + slope * depths
        rates = tokens / seconds * plain
        best = int(rates.argmax())
        if rates[-1] * (GAIN if self.plain else DOUBT) >= rates[best]:
            best = self.num_draft_tokens - 1
        elif not self.plain:
            return 0
        return best + 1 if rates[best] * self._credit >= 1 else 0

    @property
    def _credit(self) -> float:
        """What drafting is let off with: something while plain rounds were timed too seldom to know, nothing after that."""
        return GAIN if len(self.plain) < KNOWN else 1.0

    def rate(self, tokens: float, seconds: float, rows: int) -> float:
        """Tokens per second that further nodes and steps of a round have to beat: as `Habit.rate`, or plain decoding's."""
        known = self.plain or self.verify  # which takes no less
        return max(self.habit.rate(tokens, seconds, rows), rows / median(known) if known else 0.0)

    def goes_on(self, gain: float, cost: float, promised: float, spent: float, rows: int = 1) -> bool:
        """Whether a drafter that works in steps should take another: while it brings tokens faster than rounds do.

        Args:
            gain, cost: tokens expected of the step, over all rows, and its seconds.
            promised, spent: tokens expected of the round so far, the target's own included, and its seconds.
            rows: that draft.
        """
        if not self.adaptive or not self.verify:
            return True
        return gain > cost * self.rate(promised, spent + median(self.verify) + median(self.other), rows)

    def worth(self, confidences: Sequence[float]) -> int:
        """How long a chain should be whose drafts are accepted with these chances: it grows while the tokens per second do.

        It stops at the first fall, so a longer chain never depends on a confidence that has seen its own token (DSpark, 4.5).
        """
        if not self.adaptive or not self.verify or not self.plain:
            return len(confidences)
        verify, rows, plain = median(self.verify), median(self.rows), median(self.plain)
        slope = max(0.0, (verify - plain) / max(1, rows - 1))
        tokens, chance = 1.0, 1.0
        seconds = median(self.draft) + median(self.other) + verify - slope * (rows - 1)
        for length, confidence in enumerate(confidences):
            chance *= confidence
            if (tokens + chance) * (seconds + slope * length) < tokens * (seconds + slope * (length + 1)):
                return length
            tokens += chance
        return len(confidences)

    def spares(self, copied: Sequence[Sequence[float]]) -> bool:
        """Whether the drafter's time is better spent on other rounds than on guesses beside these copies.

        Where a row's first copied token is wrong, a guess would have brought what drafts bring; else the drafter's time is lost.

        Args:
            copied: of the rows that go on, the chances of copied tokens, if those before them are right.
        """
        if not self.adaptive or len(self.draft) < TRIAL or not any(map(len, copied)):
            return False
        guessed = numpy.cumprod(self.accepted[1 : 1 + self.num_draft_tokens]).sum()
        tokens = sum(1 + numpy.cumprod(beliefs).sum() for beliefs in copied)
        missed = sum(1 - (beliefs[0] if len(beliefs) else 0.0) for beliefs in copied) * guessed
        rate = self.rate(tokens, median(self.verify) + median(self.other), len(copied))
        return bool(median(self.draft) * rate > missed)

    def cut(self, trees: Sequence[Draft], drafting: float | None = None) -> list[Draft]:
        """Each row's tree, as large as further nodes bring tokens faster than rounds do: one size, for the largest sets the pace.

        Args:
            trees: best-first, with `beliefs` calibrated by `factors`; empty for rows that do not draft.
            drafting: seconds that they took; default: as drafts take here.
        """
        tokens = numpy.zeros(max(map(len, trees)))
        for tree in trees:
            reach = tree.reach()
            tokens += 1 + numpy.cumsum(numpy.pad(reach, (0, len(tokens) - len(reach)))) if len(tree) else 0.0
        if drafting is None:
            drafting = median(self.draft) if self.draft else 0.25 * float(self.cost.latency(1))
        size = 0
        if len(sizes := numpy.arange(1, len(tokens) + 1)):
            seconds = drafting + self.cost(1 + sizes)
            best = int((tokens / seconds).argmax())
            rate = self.rate(float(tokens[best]), float(seconds[best]), sum(map(bool, map(len, trees))))
            worth = numpy.where((sizes < STEP) | ((sizes + 1) % STEP == 0), tokens - rate * seconds, -numpy.inf)
            size = 1 + int((worth >= worth.max() - NEARLY * tokens[best]).argmax())
            now, twice = self.cost(numpy.array([size + 1, 2 * size + 1])).tolist()
            self.least = SURELY * rate * max(0.0, twice - now) / size / len(trees)
        self.nodes.append(max(1, size))
        return [tree.first(size) for tree in trees]

    @property
    def most_nodes(self) -> int:
        """How large a tree is worth building before it is cut: some more than was worth verifying in any of the last rounds."""
        return min(MAX_TREE, 5 * max(self.nodes) // 4 + 2)

    def observe(
        self,
        drafts: Sequence[Draft],
        paths: Sequence[list[int] | None],
        draft: float,
        verify: float,
        whole: float,
        asked: bool | None = None,
        alone: bool = False,
    ) -> None:
        """Learn from a round.

        Args:
            drafts: of all rows.
            paths: accepted nodes of each row; None for one that had ended before.
            draft, verify, whole: seconds of the drafter, of the target's forward and of the round.
            asked: whether the drafter was, which may have had no guess; default: if there are drafts.
            alone: whether all drafts are copies, for which it was not.
        """
        self.rounds += 1
        active = [(tree, path) for tree, path in zip(drafts, paths, strict=True) if path is not None]
        size = max(tree.num_rows for tree, _ in active)
        asked = size > 0 if asked is None else asked
        if asked:
            self.empty, self.rests = (0 if size else self.empty + 1), False
        if self.rounds == 1:  # it read the prompt: its times say nothing, a wrong guess does
            if asked and (self.chain or size == 0):
                self._judge(any(path for _, path in active), size == 0)
            return
        begins, self.drafting = not self.drafting, asked
        if size == 0:
            self.plain.append(whole - draft)
            if not asked:
                return
        # Prompt tokens alone: their guesses come with the next round.
        if size > 0 and begins and not any(len(tree) for tree, _ in active):
            return
        self._judge(any(path for _, path in active), size == 0)
        for kept, value in ((self.draft, draft), (self.verify, verify), (self.other, whole - draft - verify)):
            if kept is not self.draft or not alone:
                kept.append(value)
        self.rows.append(size + 1)
        if self.cost is not None:
            self.cost.observe(size + 1, whole - draft)
        self.emitted.append(1 + sum(len(path) for _, path in active) / len(active))
        for counts in (self.tried, self.held, self.hits, self.mass):
            counts *= DECAY
        self.hits += 2 * (1 - DECAY)
        self.mass += 2 * (1 - DECAY)
        tried, held = numpy.zeros_like(self.tried), numpy.zeros_like(self.held)
        for tree, path in active:
            if size == 0:  # no guess is a wrong one
                tried[1] += 1
            for depth, node in enumerate((-1, *path), 1):
                if not (children := tree.children(node)):
                    break
                hit = depth <= len(path)
                tried[depth] += 1
                held[depth] += hit
                if tree.beliefs is not None:
                    believed = sum(tree.beliefs[child] for child in children) / max(1e-6, self.factors[depth])
                    self.mass[depth] += believed
                    self.hits[depth] += hit
        self.tried += tried
        self.held += held
        self._fade(FADING)
        seconds = median(self.draft) + median(self.verify) + median(self.other)
        gain = self.emitted[-1] * median(self.plain) / seconds if self.plain else None
        spent, rows = seconds - (median(self.draft) if alone else 0.0), len(active)
        self.habit.observe(tried / rows, held / rows, gain, rows * self.emitted[-1], spent, rows)

    def _fade(self, left: float) -> None:
        """What earlier calls brought counts less."""
        self.earlier *= left
        self.earlier_tried *= left
        self.earlier_held *= left

    def _judge(self, accepted: bool, empty: bool) -> None:
        """Go on with the trial; end it early where chains are wrong from the start, make it longer where a look was right."""
        self.trial, self.misses = max(0, self.trial - 1), 0 if accepted else self.misses + 1
        if (self.chain or empty) and self.misses >= MISSES:  # a tree's first guess may be right in a few rounds only, and pay
            self.trial = 0
        elif accepted and self.looks:
            self.trial, self.looks = MISSES, False
            self.tried *= 0.5  # what was seen before the pause counts half
            self.held *= 0.5
