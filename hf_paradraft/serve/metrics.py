"""Counts of requests, tokens and drafts, for Prometheus."""

from itertools import pairwise
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ..protocol import SpeculationStats
from .scheduler import Job, Scheduler


def speculation(stats: SpeculationStats) -> dict[str, Any]:
    """Count the drafts of a request, under the names that vLLM uses.

    They are those of its `--per-request-spec-decode-metrics`.
    """
    # rounds with a draft, and rounds that accepted at least 1, 2, … tokens
    reached = [
        *stats.attempts[:1],
        *stats.successes,
        0,
    ]
    steps, accepted = reached[0], sum(stats.successes)
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / stats.num_drafted if stats.num_drafted else 0.0,
        "acceptance_histogram": [some - more for some, more in pairwise(reached)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": stats.num_drafted,
    }


class Metrics:
    """Counts for Prometheus.

    Args:
        scheduler: the scheduler, which counts running and waiting requests.
    """

    def __init__(self, scheduler: Scheduler):
        self.registry = registry = CollectorRegistry()
        self.drafts = Counter("spec_decode_num_drafts", "Rounds with a draft.", registry=registry)
        self.drafted = Counter("spec_decode_num_draft_tokens", "Drafted tokens.", registry=registry)
        self.emitted = Counter(
            "spec_decode_num_emitted_tokens",
            "New tokens, the target's own included.",
            registry=registry,
        )
        self.accepted = Counter(
            "spec_decode_num_accepted_tokens", "Accepted drafted tokens.", registry=registry
        )
        self.by_position = Counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafted tokens.",
            ["position"],
            registry=registry,
        )
        self.asked = Counter("prefix_cache_queries", "Tokens of prompts.", registry=registry)
        self.known = Counter(
            "prefix_cache_hits", "Tokens of prompts that were read before.", registry=registry
        )
        self.requests = Counter(
            "requests", "Requests, by how they ended.", ["finish_reason"], registry=registry
        )
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From a request to its first token.", registry=registry
        )
        self.seconds = Histogram("request_seconds", "From a request to its end.", registry=registry)
        running = Gauge(
            "num_requests_running", "Requests that are being answered.", registry=registry
        )
        running.set_function(
            lambda: (
                len(scheduler.running) + sum(job.batch is not None for job in [*scheduler.entering])
            )
        )
        waiting = Gauge(
            "num_requests_waiting", "Requests that wait for a place.", registry=registry
        )
        waiting.set_function(lambda: sum(job.batch is None for job in [*scheduler.entering]))

    def count(self, job: Job, reason: str, seconds: float) -> None:
        """Count a request that has ended."""
        stats = job.stats
        self.asked.inc(len(job.ids))
        self.known.inc(job.known)
        self.accepted.inc(sum(stats.successes))
        self.drafts.inc(stats.attempts[0] if stats.attempts else 0)
        self.drafted.inc(stats.num_drafted)
        self.emitted.inc(stats.num_emitted)
        for position, accepted in enumerate(stats.successes):
            self.by_position.labels(str(position)).inc(accepted)
        self.requests.labels(reason).inc()
        self.seconds.observe(seconds)
