"""Will this pair pay on this machine, and with which K? A prediction from a short measurement."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from time import perf_counter

import torch
from transformers import PreTrainedModel

from ..drafters.kind import Variant
from ..drafters.pard import PardDrafter
from ..protocol import Drafter, SpeculationConfig, SpeculationStats
from .measure import Settings, bench
from .methods import drafted, plain
from .questions import Prompt
from .results import records

PLAIN_ROUNDS = 24


@dataclass
class Plan:
    """Chains of one length.

    Attributes:
        num_draft_tokens: K.
        round_cost: of a drafted round, in plain rounds; τ has to be larger for drafting to pay.
        tau: expected new tokens per round, the target's own included.
        speedup: expected, over plain `generate`.
    """

    num_draft_tokens: int
    round_cost: float
    tau: float
    speedup: float


def expected_tau(acceptance: Sequence[float], num_draft_tokens: int) -> float:
    """1 + Σ_d Π_{i ≤ d} a_i over the first K positions; the last known rate stands for those never reached."""
    tau, chance = 1.0, 1.0
    for position in range(num_draft_tokens):
        chance *= acceptance[min(position, len(acceptance) - 1)] if acceptance else 0.0
        tau += chance
    return tau


@torch.no_grad()
def plan(
    target: PreTrainedModel,
    drafter: PardDrafter,
    prompts: Sequence[Prompt],
    draft_lengths: Sequence[int] = (2, 4, 6, 8, 12, 16),
    max_new_tokens: int = 64,
    acceptance: float | None = None,
) -> list[Plan]:
    """Predict chains' speed-ups, prompts included.

    Acceptance comes from one run per prompt with the longest chains; the cost of a round from a few rounds of every length. Both
    sides' first forward, over the prompt, is timed too.

    Args:
        target, drafter: on their devices, in their dtypes.
        prompts: a handful of the kind that will be asked.
        draft_lengths: K.
        max_new_tokens: of an answer, at most; how long answers are is measured too.
        acceptance: P(a drafted token is right | the ones before were), instead of the measured rates: for a drafter that is not
            trained yet.

    Returns:
        One entry per length, in their order.

    Raises:
        ValueError: prompt tokens instead of a drafter.
    """
    if not isinstance(drafter, PardDrafter):
        raise ValueError(
            "Plans are made for PARD drafters; for prompt tokens, paradraft calibrate shows what each size promises."
        )
    own = copy.copy(drafter)
    options = {"do_sample": False, "pad_token_id": 0}

    def plain_seconds(ids: torch.LongTensor, new_tokens: int) -> float:
        clock = perf_counter()
        target.generate(ids, attention_mask=torch.ones_like(ids), **options, eos_token_id=None, max_new_tokens=new_tokens)
        return perf_counter() - clock

    def rounds(ids: torch.LongTensor, length: int, new_tokens: int, eos_token_id: int | list[int] | None) -> SpeculationStats:
        own.speculation_config = SpeculationConfig(length, None, never_slower=False, trace=True)
        inputs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens, "eos_token_id": eos_token_id}
        target.generate(ids, **inputs, **options, assistant_model=own)
        return own.last_stats

    def measure(some: Sequence[Prompt]) -> _Measured:
        found = _Measured([], [], [], {length: [] for length in draft_lengths}, [], SpeculationStats())
        for prompt in some:
            ids = prompt.ids.to(target.device)
            found.plain_first.append(plain_seconds(ids, 1))
            found.plain.append((plain_seconds(ids, 1 + PLAIN_ROUNDS) - found.plain_first[-1]) / PLAIN_ROUNDS)
            for length in draft_lengths:
                trace = rounds(ids, length, 4 * length + 5, None).trace
                found.drafted_first.append(trace[0].total_seconds)
                found.drafted[length] += [entry.total_seconds for entry in trace[1:] if len(entry.drafted) == length]
            if acceptance is None:
                stats = rounds(ids, max(draft_lengths), max_new_tokens, target.generation_config.eos_token_id)
                found.lengths.append(stats.num_emitted)
                found.stats += stats
        return found

    measure(prompts[:1])  # warm up
    found = measure(prompts)
    rates = found.stats.acceptance_by_position if acceptance is None else [acceptance]
    new_tokens = mean(found.lengths) if found.lengths else max_new_tokens
    plain_time = median(found.plain_first) + (new_tokens - 1) * median(found.plain)
    made = []
    for length in draft_lengths:
        cost, tau = median(found.drafted[length]), expected_tau(rates, length)
        drafting = median(found.drafted_first) + max(0, new_tokens / tau - 1) * cost
        made.append(Plan(length, cost / median(found.plain), tau, plain_time / drafting))
    return made


@dataclass
class _Measured:
    """Seconds of first forwards and of rounds, plain and by draft length; answers' lengths, and what was accepted."""

    plain_first: list[float]
    plain: list[float]
    drafted_first: list[float]
    drafted: dict[int, list[float]]
    lengths: list[int]
    stats: SpeculationStats


def measured(
    target: PreTrainedModel, drafter: Drafter, prompts: Sequence[Prompt], plans: Sequence[Plan], max_new_tokens: int
) -> list[float]:
    """What came of the plans: tokens per second over plain `generate`'s, on prompts that they have not seen."""
    lengths = [entry.num_draft_tokens for entry in plans]
    methods = [drafted(Variant(f"pard-chain-k{length}", drafter, SpeculationConfig(length, None))) for length in lengths]
    plain_row, *rows = records(bench(target, [plain(), *methods], prompts, Settings(max_new_tokens)))
    return [row["tokens_per_second"] / plain_row["tokens_per_second"] for row in rows]
