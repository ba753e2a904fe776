"""Counts of what was served, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ..protocol import SpeculationStats
from .scheduler import Scheduler


class Metrics:
    """Counts for Prometheus.

    Args:
        scheduler: knows who runs and who waits.
    """

    def __init__(self, scheduler: Scheduler):
        self.registry = registry = CollectorRegistry()
        self.drafts = Counter("spec_decode_num_drafts", "Rounds with a draft.", registry=registry)
        self.drafted = Counter("spec_decode_num_draft_tokens", "Drafted tokens.", registry=registry)
        self.emitted = Counter("spec_decode_num_emitted_tokens", "New tokens, the target's own included.", registry=registry)
        self.accepted = Counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted drafted tokens.", ["position"], registry=registry
        )
        self.requests = Counter("requests", "Requests, by how they ended.", ["finish_reason"], registry=registry)
        self.first_token = Histogram("time_to_first_token_seconds", "From a request to its first token.", registry=registry)
        self.seconds = Histogram("request_seconds", "From a request to its end.", registry=registry)
        running = Gauge("num_requests_running", "Requests that are being answered.", registry=registry)
        running.set_function(lambda: len(scheduler.running) + (scheduler.reading is not None))
        waiting = Gauge("num_requests_waiting", "Requests that wait for a place.", registry=registry)
        waiting.set_function(lambda: len(scheduler.waiting))

    def count(self, stats: SpeculationStats, reason: str, seconds: float) -> None:
        """Count a request that has ended."""
        self.drafts.inc(stats.attempts[0] if stats.attempts else 0)
        self.drafted.inc(stats.num_drafted)
        self.emitted.inc(stats.num_emitted)
        for position, accepted in enumerate(stats.successes):
            self.accepted.labels(str(position)).inc(accepted)
        self.requests.labels(reason).inc()
        self.seconds.observe(seconds)
