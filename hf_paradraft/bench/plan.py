"""Will drafting pay on this machine, and with which K? A forecast from the target's latency by rows and the acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from transformers import PreTrainedModel

from ..decoding.latency import row_latency
from ..protocol import Drafter, SpeculationConfig, SpeculationStats
from .measure import Runner, Settings
from .methods import drafted
from .questions import Prompt
from .variants import Variant

ROUNDS = 4  # of each prompt by which drafting is timed, where the acceptance is assumed


@dataclass
class Plan:
    """A forecast for chains of one length.

    Attributes:
        num_draft_tokens: K.
        round_cost: seconds of a drafted round, in plain rounds; drafting pays if τ is larger.
        tau: expected new tokens per round, the target's own included.
    """

    num_draft_tokens: int
    round_cost: float
    tau: float

    @property
    def speedup(self) -> float:
        """Expected speed-up over plain `generate`, prompts left out."""
        return self.tau / self.round_cost


def expected_tau(acceptance: Sequence[float], num_draft_tokens: int) -> float:
    """Compute `1 + Σ_d Π_{i ≤ d} a_i` over K positions; the last known rate stands for those never reached."""
    positions = range(num_draft_tokens)
    chances = [acceptance[min(position, len(acceptance) - 1)] if acceptance else 0.0 for position in positions]
    return 1.0 + float(numpy.cumprod(chances).sum())


def plan(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    draft_lengths: Sequence[int],
    max_new_tokens: int = 64,
    acceptance: float | None = None,
) -> list[Plan]:
    """Forecast chains of a few lengths; `paradraft bench` measures, trees and copies included.

    Args:
        target, drafter: the pair, on their devices, in their dtypes.
        prompts: a handful of the kind that will be asked.
        draft_lengths: K of each chain.
        max_new_tokens: tokens of an answer at most.
        acceptance: P(a drafted token is right | the ones before were), for a drafter that is not trained yet; default: measured
            on the prompts, with the longest chain.

    Raises:
        ValueError: the answers ended before anything could be drafted.
    """
    latency = row_latency(target)

    def ask(length: int, new_tokens: int) -> SpeculationStats:
        config = SpeculationConfig(length, None, never_slower=False)
        method = drafted(Variant(f"chain-k{length}", drafter, config))
        stats = SpeculationStats()
        for prompt in prompts:
            Runner(target, Settings(new_tokens), pad_token_id=0)(method, [prompt], 0.0)
            stats += drafter.last_stats
        if not stats.num_drafted:
            raise ValueError("The answers ended before anything could be drafted: give other prompts, or more new tokens.")
        return stats

    most = drafter.most_drafts
    lengths = list(dict.fromkeys(length if most is None else min(length, most) for length in draft_lengths))
    ask(lengths[0], ROUNDS)  # warm up
    rates = [acceptance] if acceptance is not None else ask(max(lengths), max_new_tokens).acceptance_by_position
    plans = []
    for length in lengths:
        stats = ask(length, ROUNDS * (length + 1))
        seconds = stats.draft_seconds / stats.num_rounds + float(latency(1 + length))
        plans.append(Plan(length, seconds / float(latency(1)), expected_tau(rates, length)))
    return plans
