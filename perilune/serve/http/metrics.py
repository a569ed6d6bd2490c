"""Prometheus: latencies as clients feel them, and the engine's own figures read at each scrape."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from perilune.serve.request import Stats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GAUGES = {
    "running": "Requests in the batch",
    "waiting": "Requests in the queue",
    "page_tokens": "Tokens of a physical page",
    "match_tokens": "Unit of a prefix hit: nothing shorter is ever found",
    "step_seconds": "Length of the last step",
    "last_batch": "Requests in the last step",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens admitted",
    "completion_tokens": "Tokens generated",
    "preemptions": "Requests put back into the queue",
    "evictions": "Cached pages given up",
    "steps": "Steps of the engine",
    "drafted": "Tokens drafted by speculation",
    "accepted": "Drafted tokens that the model accepted",
}


class Metrics:
    """One server's registry."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "perilune_requests", "Requests by path and status", ["path", "status"], registry=self.registry
        )
        self.finished = Counter("perilune_finished", "Choices by how they ended", ["reason"], registry=self.registry)
        self.ttft = self._seconds("perilune_ttft_seconds", "Arrival to first token")
        self.tpot = self._seconds("perilune_tpot_seconds", "Between tokens after the first, mean of a choice")
        self.total = self._seconds("perilune_request_seconds", "Arrival to last token")
        self.registry.register(_Engine(stats))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _seconds(self, name: str, words: str) -> Histogram:
        return Histogram(name, words, buckets=_SECONDS, registry=self.registry)


class _Engine(Collector):
    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, words in _GAUGES.items():
            yield GaugeMetricFamily(f"perilune_{name}", words, value=getattr(stats, name))
        for name, words in _COUNTERS.items():
            yield CounterMetricFamily(f"perilune_{name}", words, value=getattr(stats, name))
        uses = (("running", stats.pages_running), ("cached", stats.pages_cached), ("free", stats.pages_free))
        yield _labelled(GaugeMetricFamily, "perilune_pool_pages", "Pages of the pool by use", "use", uses)
        tiers = (("pool", stats.hit_tokens), ("offload", stats.offload_tokens))
        yield _labelled(
            CounterMetricFamily, "perilune_hit_tokens", "Prompt tokens not computed, by tier", "tier", tiers
        )


def _labelled(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    words: str,
    label: str,
    values: Iterable[tuple[str, int]],
) -> Metric:
    family = kind(name, words, labels=[label])
    for value, count in values:
        family.add_metric([value], count)
    return family
