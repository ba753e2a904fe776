"""Statistics of a `generate` call: counts by round and by draft position, and times."""

from abc import abstractmethod
from dataclasses import dataclass, field, fields
from itertools import zip_longest

from ..names import BaseStreamer
from .draft import Draft


@dataclass
class SequenceRound:
    """One sequence's part of a round, filled while its draft is judged.

    After an error it holds the tokens that were judged before.

    Attributes:
        row: the sequence's place in the call's batch.
        draft: the draft that was verified.
        accepted: the accepted nodes, from the root down.
        emitted: ids of the new tokens, the target's own last, unless the text ended before it.
        judged: the number of draft positions that were accepted or rejected; later ones were never
            compared.
        begin: the sequence's length before the round.
        num_read: the number of accepted nodes that plain decoding would have read by now: all but
            the newest token, if that was drafted.
    """

    row: int
    draft: Draft
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    judged: int = 0
    begin: int = 0
    num_read: int = 0


@dataclass
class Round:
    """The record of one round, from which statistics, trace and budget are updated.

    Attributes:
        sequences: the parts of sequences that had not ended before.
        draft_seconds: the seconds in which only the drafter ran.
        verify_seconds: the seconds of the target's forward.
        total_seconds: the seconds of the whole round.
        hidden_seconds: the drafter's seconds during the verification.
        asked: whether the drafter was asked for guesses; copies and plain rounds do without.
        reads_prompt: whether the forward read the prompt too, so that its time says nothing about
            other rounds.
    """

    sequences: list[SequenceRound]
    draft_seconds: float
    verify_seconds: float
    total_seconds: float
    hidden_seconds: float = 0.0
    asked: bool = True
    reads_prompt: bool = False


@dataclass
class RoundTrace:
    """One sequence's part of a round, as `SpeculationConfig.trace` keeps it.

    Attributes:
        row: the sequence's place in the batch.
        drafted: the token ids of the draft's nodes.
        parents: the nodes' parents; -1 is the last known token.
        accepted: the accepted nodes, from the root down.
        emitted: the ids of the new tokens.
        draft_seconds, verify_seconds, total_seconds: the seconds of the whole batch's round.
        hidden_seconds: the drafter's seconds during the verification; 0 without `overlap`.
    """

    row: int
    drafted: list[int]
    parents: list[int]
    accepted: list[int]
    emitted: list[int]
    draft_seconds: float
    verify_seconds: float
    total_seconds: float
    hidden_seconds: float = 0.0


@dataclass
class SpeculationStats:
    """Counts and times of one `generate` call.

    Attributes:
        num_rounds: the number of rounds, each one forward of the target; in `by_row`, those before
            the sequence ended.
        num_drafted: the number of drafted tokens, accepted or not.
        emitted_per_round: the number of new tokens of each round and sequence, the target's own
            (bonus) token included.
        attempts: the number of times that draft position `d` (from 0) was judged, which happens if
            `d - 1` was accepted.
        successes: the number of times that position `d` was accepted.
        draft_seconds: the seconds in which only the drafter ran.
        hidden_seconds: the drafter's seconds during verifications; 0 without `overlap`.
        verify_seconds: the seconds of the target's forwards.
        total_seconds: the wall time of the loop.
        trace: every round of every sequence, if `SpeculationConfig.trace`.
        by_row: the counts of each sequence of a batch, without times; empty for one sequence.
    """

    num_rounds: int = 0
    num_drafted: int = 0
    emitted_per_round: list[int] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    successes: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    hidden_seconds: float = 0.0
    trace: list[RoundTrace] = field(default_factory=list)
    by_row: list["SpeculationStats"] = field(default_factory=list)

    @property
    def num_emitted(self) -> int:
        """The number of new tokens in all rounds."""
        return sum(self.emitted_per_round)

    @property
    def mean_emitted(self) -> float:
        """τ: new tokens per sequence and forward, the bonus token included.

        Plain decoding has 1; before any round it is 0.0.
        """
        return self.num_emitted / len(self.emitted_per_round) if self.emitted_per_round else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """P(position `d` accepted | `d - 1` accepted), for each position that was judged."""
        return [good / tried for good, tried in zip(self.successes, self.attempts, strict=True)]

    def add(self, record: Round, trace: bool = False) -> None:
        """Count a round, and keep its trace if that is wanted."""
        times = (
            record.draft_seconds,
            record.verify_seconds,
            record.total_seconds,
            record.hidden_seconds,
        )
        self.num_rounds += 1
        self.draft_seconds += record.draft_seconds
        self.verify_seconds += record.verify_seconds
        self.hidden_seconds += record.hidden_seconds
        for part in record.sequences:
            for stats in (self, *self.by_row[part.row : part.row + 1]):
                stats.num_rounds += stats is not self
                stats._count(part)
            if trace:
                drafted = part.draft.token_ids, part.draft.parents
                self.trace.append(
                    RoundTrace(part.row, *drafted, part.accepted, part.emitted, *times)
                )

    def take_back(self, row: int, length: int) -> None:
        """Forget the newest tokens of a sequence of a batch, which a criterion has taken back.

        Args:
            row: the sequence's place.
            length: the number of its new tokens that stay.
        """
        own = self.by_row[row].emitted_per_round
        while (surplus := sum(own) - length) > 0:
            last = own.pop()
            self.emitted_per_round.remove(last)
            if last > surplus:
                own.append(last - surplus)
                self.emitted_per_round.append(last - surplus)

    def _count(self, part: SequenceRound) -> None:
        self.num_drafted += len(part.draft)
        self.emitted_per_round.append(len(part.emitted))
        missing = part.judged - len(self.attempts)
        self.attempts += [0] * missing
        self.successes += [0] * missing
        for position in range(part.judged):
            self.attempts[position] += 1
            self.successes[position] += position < len(part.accepted)

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        total = SpeculationStats()
        for field_ in fields(self):
            ours, theirs = getattr(self, field_.name), getattr(other, field_.name)
            if field_.name in ("attempts", "successes"):
                theirs = [a + b for a, b in zip_longest(ours, theirs, fillvalue=0)]
                ours = []
            setattr(total, field_.name, ours + theirs)
        return total

    def __str__(self) -> str:
        engine = self.total_seconds - self.draft_seconds - self.verify_seconds
        parts = {"draft": self.draft_seconds, "verify": self.verify_seconds, "engine": engine}
        shares = [
            f"{name} {100 * seconds / (self.total_seconds or 1):.0f} %"
            for name, seconds in parts.items()
        ]
        rates = self.acceptance_by_position
        lines = [
            f"new tokens      {self.num_emitted} in {self.num_rounds} rounds, {self.num_drafted} "
            "drafted",
            f"per round       τ = {self.mean_emitted:.2f} (the target's own token included)",
            "draft position  "
            + " ".join(f"{position:4d}" for position in range(1, len(rates) + 1)),
            "accepted, %     " + " ".join(f"{100 * rate:4.0f}" for rate in rates),
            f"seconds         {self.total_seconds:.3f}: {', '.join(shares)}",
        ]
        if self.hidden_seconds:
            lines.append(
                f"hidden          {self.hidden_seconds:.3f} s of drafting ran during verifications"
            )
        return "\n".join(lines)


class RoundStreamer(BaseStreamer):
    """A streamer that gets the new tokens of each round at once.

    Other streamers get tokens one by one, as in plain decoding.

    `put` gets only the prompt, as in plain decoding.
    """

    @abstractmethod
    def put_round(self, tokens: list[int], num_accepted: int) -> None:
        """Take a round's new tokens, of which the first `num_accepted` were drafted."""
