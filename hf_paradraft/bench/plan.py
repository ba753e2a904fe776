"""Will this pair pay on this machine, and with which K? A prediction from a short measurement."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from statistics import mean, median

import numpy
import torch
from transformers import PreTrainedModel

from ..decoding.pearl import check_overlap, device_of
from ..decoding.schedule import overlapped_rates
from ..drafters.drafter import NamedDrafter, Variant, with_prompt_lookup
from ..drafters.ngram import NgramDrafter
from ..names import is_recurrent_model
from ..protocol import Drafter, RoundTrace, SpeculationStats
from ..protocol.config import TreeSize
from .measure import Runner, Settings, bench
from .methods import drafted, plain, threads
from .questions import Prompt
from .results import records

PLAIN_ROUNDS = 24


@dataclass
class Plan:
    """One way to draft.

    Attributes:
        way: under its name in benchmarks.
        round_cost: of a drafted round, in plain rounds; τ has to be larger for drafting to pay.
        tau: expected new tokens per round, the target's own included.
        speedup: expected, over plain `generate`.
    """

    way: Variant
    round_cost: float
    tau: float
    speedup: float


@dataclass
class _Measured:
    """What was seen, in seconds where nothing else is said.

    Attributes:
        plain_first, plain: the first forward, and a later one.
        first: the first round of every drafted answer.
        rounds: by way, later ones.
        lengths: of answers.
        stats: by way, what was accepted.
    """

    plain_first: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    first: list[RoundTrace] = field(default_factory=list)
    rounds: dict[str, list[RoundTrace]] = field(default_factory=lambda: defaultdict(list))
    lengths: list[int] = field(default_factory=list)
    stats: dict[str, SpeculationStats] = field(default_factory=lambda: defaultdict(SpeculationStats))

    def answered(self, way: Variant) -> None:
        """Count the whole answer that was drafted last."""
        self.lengths.append(way.drafter.last_stats.num_emitted)
        self.stats[way.name] += way.drafter.last_stats


def _chances(acceptance: Sequence[float], num_draft_tokens: int) -> numpy.ndarray:
    """Of each of K positions, float64 `(K,)`; the last known rate stands for those never reached."""
    positions = range(num_draft_tokens)
    return numpy.array([acceptance[min(position, len(acceptance) - 1)] if acceptance else 0.0 for position in positions])


def expected_tau(acceptance: Sequence[float], num_draft_tokens: int) -> float:
    """1 + Σ_d Π_{i ≤ d} a_i over the first K positions."""
    return 1.0 + float(numpy.cumprod(_chances(acceptance, num_draft_tokens)).sum())


@torch.no_grad()
def plan(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    draft_lengths: Sequence[int] = (2, 4, 6, 8, 12, 16),
    max_new_tokens: int = 64,
    acceptance: float | None = None,
    overlap: bool = False,
    tree_sizes: Sequence[TreeSize] = (),
    prompt_lookup: bool = False,
) -> list[Plan]:
    """Predict speed-ups, prompts included.

    *Chains of a model that drafts*: acceptance comes from one run per prompt with the longest ones; the cost of a round from a
    few rounds of every length. *Trees, copied drafts and prompt tokens*, whose rounds are of all sizes: both come from whole
    answers, decoded as they will be. Both sides' first forward, over the prompt, is timed too.

    Args:
        target, drafter: on their devices, in their dtypes.
        prompts: a handful of the kind that will be asked.
        draft_lengths: K; prompt tokens have their own.
        max_new_tokens: of an answer, at most; how long answers are is measured too.
        acceptance: P(a drafted token is right | the ones before were), instead of the measured rates: for a drafter that is not
            trained yet.
        overlap: chains that are drafted while the target verifies too (PEARL), each side with half of the CPU's threads, or with
            a device of its own.
        tree_sizes: N, of trees as deep as the longest chain.
        prompt_lookup: the trees once more, with copied drafts.

    Returns:
        One entry per way to draft, in their order; overlapped ones last.

    Raises:
        ValueError: an assumed acceptance for drafts that are not of one length; a drafter that cannot overlap, or that is of no
            kind that is known here.
    """
    if not isinstance(drafter, NamedDrafter):
        raise ValueError(f"{type(drafter).__name__} is of no kind that this library plans with.")
    ways = drafter.variants(draft_lengths, () if isinstance(drafter, NgramDrafter) else tree_sizes)
    if prompt_lookup:
        ways += with_prompt_lookup(ways)
    chains = [way for way in ways if not _of_all_sizes(way)]
    if overlap:
        check_overlap(target, drafter, is_recurrent_model(target))
        if not chains:
            raise ValueError("Copied drafts cost nothing that could be hidden: plan them without overlap.")
    if acceptance is not None and len(chains) < len(ways):
        raise ValueError("An acceptance can be assumed for chains of a model, not for trees, prompt tokens or copied drafts.")

    def ask(prompt: Prompt, new_tokens: int, way: Variant | None = None, ends: bool = False) -> float:
        """Seconds of an answer, plain or drafted."""
        method = plain()
        if way is not None:
            never_slower = way.config.never_slower and _of_all_sizes(way)
            method = drafted(replace(way, config=replace(way.config, never_slower=never_slower, trace=True)))
        if not ends:
            method.arguments["eos_token_id"] = None
        _, answer = Runner(target, Settings(new_tokens), pad_token_id=0)(method, [prompt], 0.0)
        return answer.seconds[0]

    def measure(sample: Sequence[Prompt], ways: Sequence[Variant]) -> _Measured:
        results = _Measured()
        for prompt in sample:
            results.plain_first.append(ask(prompt, 1))
            results.plain.append((ask(prompt, 1 + PLAIN_ROUNDS) - results.plain_first[-1]) / PLAIN_ROUNDS)
            for way in ways:
                length, whole = way.config.num_draft_tokens, _of_all_sizes(way)
                ask(prompt, max_new_tokens if whole else 4 * length + 5, way, whole)
                first, *later = drafter.last_stats.trace
                if not whole:
                    later = [entry for entry in later if entry.drafted]
                    later = [entry for entry in later if len(entry.drafted) == length] or later  # a short context cuts all
                results.first.append(first)
                results.rounds[way.name] += later
                if whole:
                    results.answered(way)
            if chains and acceptance is None:
                longest = max(chains, key=lambda way: way.config.num_draft_tokens)
                ask(prompt, max_new_tokens, longest, True)
                results.answered(longest)
        return results

    measure(prompts[:1], ways)  # warm up
    results = measure(prompts, ways)
    new_tokens = mean(results.lengths) if results.lengths else max_new_tokens
    plain_time = median(results.plain_first) + (new_tokens - 1) * median(results.plain)
    seen = sum((results.stats[way.name] for way in chains), SpeculationStats())
    rates = [acceptance] if acceptance is not None else seen.acceptance_by_position
    if not all(results.rounds[way.name] for way in ways):
        raise ValueError("The answers ended before anything could be drafted: give other prompts, or a larger --max-new-tokens.")
    made = []
    for way in ways:
        cost = _cost(results.rounds[way.name])
        tau = results.stats[way.name].mean_emitted if _of_all_sizes(way) else expected_tau(rates, way.config.num_draft_tokens)
        drafting = median(first.total_seconds for first in results.first) + max(0, new_tokens / tau - 1) * cost
        made.append(Plan(way, cost / median(results.plain), tau, plain_time / drafting))
    if overlap:
        both = target.device.type == "cpu" and device_of(drafter) in (None, target.device)
        with threads(max(1, torch.get_num_threads() // 2)) if both else nullcontext():
            apart = measure(prompts, chains)
        made += [_pearl(way, apart, rates, median(results.plain), plain_time, new_tokens) for way in chains]
    return made


def _pearl(way: Variant, apart: _Measured, rates: Sequence[float], plain: float, plain_time: float, new_tokens: float) -> Plan:
    """A chain that is drafted while the target verifies, from what both sides take apart and the chance that a guess is right."""
    rounds, right = apart.rounds[way.name], _chances(rates, way.config.num_draft_tokens)
    drafting, alone = median(entry.draft_seconds for entry in rounds), median(apart.plain)
    verifying = max(alone, _cost(rounds) - drafting)
    draft, verify = (lambda sizes: drafting + 0.0 * sizes), (lambda rows: numpy.where(rows == 1, alone, verifying))
    alone_first, drafts_first = (float(overlapped_rates(right, draft, verify, ahead)[-1]) for ahead in (False, True))
    rate, whole = max(alone_first, drafts_first), numpy.cumprod(right)
    with_window = right[0] * (whole[-1] if drafts_first > alone_first else 1.0)
    tau = float((whole.sum() + 1 - whole[-1]) / (with_window + 1 - whole[-1]))
    first = median(max(entry.draft_seconds, entry.total_seconds - entry.draft_seconds) for entry in apart.first)
    overlapped = Variant(f"pearl-{way.name}", way.drafter, replace(way.config, overlap=True, never_slower=False))
    return Plan(overlapped, tau / rate / plain, tau, plain_time / (first + (new_tokens - 1) / rate))


def _of_all_sizes(way: Variant) -> bool:
    """Whether its rounds differ in what they draft: trees, copied drafts, prompt tokens."""
    return way.config.tree_size is not None or isinstance(way.drafter, NgramDrafter)


def _cost(rounds: Sequence[RoundTrace]) -> float:
    """Mean seconds of rounds, each taken as the median of those with as many drafts: one that was disturbed does not count."""
    by_size: dict[int, list[float]] = {}
    for entry in rounds:
        by_size.setdefault(len(entry.drafted), []).append(entry.total_seconds)
    return sum(len(times) * median(times) for times in by_size.values()) / len(rounds)


def measured(target: PreTrainedModel, prompts: Sequence[Prompt], plans: Sequence[Plan], max_new_tokens: int) -> list[float]:
    """What came of the plans: tokens per second over plain `generate`'s, on prompts that they have not seen."""
    methods = [plain(), *(drafted(entry.way) for entry in plans)]
    plain_row, *rows = records(bench(target, methods, prompts, Settings(max_new_tokens)))
    return [row["tokens_per_second"] / plain_row["tokens_per_second"] for row in rows]
