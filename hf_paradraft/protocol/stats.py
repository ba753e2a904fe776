"""What happened in a `generate` call: per round, per position, and where the time went."""

from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass
class RoundTrace:
    """One row in one round.

    Attributes:
        row: of the batch.
        drafted: token ids of the draft's nodes.
        parents: of the nodes; -1 is the last known token.
        accepted: the accepted nodes, from the root down.
        emitted: ids of the new tokens.
        draft_seconds, verify_seconds, total_seconds: of the whole batch's round.
        hidden_seconds: of the drafter, during the verification; 0 without `overlap`.
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
        num_rounds: target forwards; in `by_row`, those before the row ended.
        num_drafted: tokens that drafts held, accepted or not.
        emitted_per_round: new tokens of each round and row, the target's own (bonus) token included.
        attempts: how often draft position `d` (from 0) was judged, which happens when `d - 1` was accepted.
        successes: how often position `d` was accepted.
        draft_seconds: in the drafter, while nothing else ran.
        hidden_seconds: in the drafter, during verifications; 0 without `overlap`.
        verify_seconds: in the target's forwards.
        total_seconds: wall time of the loop.
        trace: every round of every row, if `SpeculationConfig.trace`.
        by_row: of a batch, each row's own counts, without times; empty for one row.
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
        """New tokens in all."""
        return sum(self.emitted_per_round)

    @property
    def mean_emitted(self) -> float:
        """τ: new tokens per row and target forward, the bonus token included (plain decoding has τ = 1); 0.0 before any round."""
        return self.num_emitted / len(self.emitted_per_round) if self.emitted_per_round else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """P(position `d` accepted | `d - 1` accepted), for each draft position that was ever judged."""
        return [good / tried for good, tried in zip(self.successes, self.attempts, strict=True)]

    def add_round(self, draft_seconds: float, verify_seconds: float) -> None:
        """Count one target forward."""
        self.num_rounds += 1
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds

    def add_row(self, num_drafted: int, num_emitted: int, num_accepted: int, num_judged: int) -> None:
        """Count what one row got from a round.

        Args:
            num_drafted: tokens in the draft.
            num_emitted: new tokens.
            num_accepted: those of them that were drafted.
            num_judged: draft positions that were accepted or rejected; later ones were never looked at.
        """
        self.num_drafted += num_drafted
        self.emitted_per_round.append(num_emitted)
        missing = num_judged - len(self.attempts)
        self.attempts += [0] * missing
        self.successes += [0] * missing
        for position in range(num_judged):
            self.attempts[position] += 1
            self.successes[position] += position < num_accepted

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        def add(ours: list[int], theirs: list[int]) -> list[int]:
            return [a + b for a, b in zip_longest(ours, theirs, fillvalue=0)]

        return SpeculationStats(
            self.num_rounds + other.num_rounds,
            self.num_drafted + other.num_drafted,
            self.emitted_per_round + other.emitted_per_round,
            add(self.attempts, other.attempts),
            add(self.successes, other.successes),
            self.draft_seconds + other.draft_seconds,
            self.verify_seconds + other.verify_seconds,
            self.total_seconds + other.total_seconds,
            self.hidden_seconds + other.hidden_seconds,
            [*self.trace, *other.trace],
            [*self.by_row, *other.by_row],
        )

    def __str__(self) -> str:
        engine = self.total_seconds - self.draft_seconds - self.verify_seconds
        parts = {"draft": self.draft_seconds, "verify": self.verify_seconds, "engine": engine}
        shares = [f"{name} {100 * seconds / (self.total_seconds or 1):.0f} %" for name, seconds in parts.items()]
        rates = self.acceptance_by_position
        lines = [
            f"new tokens      {self.num_emitted} in {self.num_rounds} rounds, {self.num_drafted} drafted",
            f"per round       τ = {self.mean_emitted:.2f} (the target's own token included)",
            "draft position  " + " ".join(f"{position:4d}" for position in range(1, len(rates) + 1)),
            "accepted, %     " + " ".join(f"{100 * rate:4.0f}" for rate in rates),
            f"seconds         {self.total_seconds:.3f}: {', '.join(shares)}",
        ]
        if self.hidden_seconds:
            lines.append(f"hidden          {self.hidden_seconds:.3f} s of drafting ran during verifications")
        return "\n".join(lines)
