"""Counters and histograms of the router: plain numbers on the hot path, turned into Prometheus families on a scrape.

Names without a prefix and with `ctx_`/`gen_` are TensorRT-LLM's; those with `trtllm_disagg_` are ours.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from router.cluster import Cluster

logger = logging.getLogger(__name__)

MANY_UNFORESEEN = 100  # requests
SHORT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
LONG = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Histogram:
    """Seconds. `counts[i]` is for values at most `bounds[i]`, the last for what is above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        buckets, running = [], 0
        for bound, count in zip([*map(str, map(float, self.bounds)), "+Inf"], self.counts, strict=True):
            running += count
            buckets.append((bound, running))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self.total)


class LegMetrics:
    """The client side of one role."""

    __slots__ = (
        "complete_latency",
        "completed_requests",
        "error_requests",
        "first_token_latency",
        "per_token_latency",
        "retry_requests",
        "total_requests",
    )

    def __init__(self) -> None:
        self.total_requests = self.error_requests = self.retry_requests = self.completed_requests = 0
        self.first_token_latency = Histogram(SHORT)
        self.complete_latency = Histogram(LONG)
        self.per_token_latency = Histogram(SHORT)

    def stream_completed(self, seconds: float, chunks: int) -> None:
        """A worker sends a chunk a token, or fewer: time per chunk stands for time per token."""
        self.completed_requests += 1
        self.complete_latency.observe(seconds)
        if chunks > 1:
            self.per_token_latency.observe(seconds / chunks)

    def families(self, prefix: str) -> Iterator[Metric]:
        for name in ("total_requests", "error_requests", "retry_requests", "completed_requests"):
            yield CounterMetricFamily(f"{prefix}_{name}", f"{name} to {prefix} workers", getattr(self, name))
        for name in ("first_token_latency", "complete_latency", "per_token_latency"):
            histogram: Histogram = getattr(self, name)
            yield histogram.family(f"{prefix}_{name}_seconds", f"{name} of {prefix} workers as the router sees it")


class RouterMetrics:
    def __init__(self) -> None:
        self.total_requests = 0
        self.stream_requests = 0
        self.nonstream_requests = 0
        self.validation_exceptions = 0  # the router refused the body
        self.http_exceptions = 0  # answered with an error status, or an error event
        self.internal_errors = 0
        self.total_responses = 0  # answered in full
        self.client_disconnects = 0
        self.finished_in_prefill = 0
        self.handoffs_released = 0
        self.local_prefills = 0  # a generation worker did it all
        self.predicted_cached_tokens = 0
        self.actual_cached_tokens = 0
        self.unforeseen_cache_hits = 0  # prompts that a worker had a part of, unknown to the index
        self.untokenized_requests = 0  # a policy wanted block keys, and the request's form allowed none
        self.queue_latency = Histogram(SHORT)
        self.ctx = LegMetrics()
        self.gen = LegMetrics()

    def note_unforeseen(self) -> None:
        self.unforeseen_cache_hits += 1
        if self.unforeseen_cache_hits == MANY_UNFORESEEN and not self.predicted_cached_tokens:
            logger.warning(
                "%d prompts were found in caches of which the index knows nothing: the workers hash prompts otherwise, "
                "or tell no events",
                self.unforeseen_cache_hits,
            )

    def families(self) -> Iterator[Metric]:
        upstream = (
            "total_requests stream_requests nonstream_requests validation_exceptions http_exceptions internal_errors "
            "total_responses"
        )
        for name in upstream.split():
            yield CounterMetricFamily(name, f"{name.replace('_', ' ')} of the router", getattr(self, name))
        ours = (
            "client_disconnects finished_in_prefill handoffs_released local_prefills predicted_cached_tokens "
            "actual_cached_tokens unforeseen_cache_hits untokenized_requests"
        )
        for name in ours.split():
            yield CounterMetricFamily(f"trtllm_disagg_{name}", f"{name.replace('_', ' ')}", getattr(self, name))
        yield self.queue_latency.family("queue_latency_seconds", "arrival to dispatch of the first leg")
        yield from self.ctx.families("ctx")
        yield from self.gen.families("gen")


class _RouterCollector(Collector):
    def __init__(self, metrics: RouterMetrics, cluster: Cluster) -> None:
        self._metrics = metrics
        self._cluster = cluster

    def collect(self) -> Iterable[Metric]:
        yield from self._metrics.families()
        yield from cluster_families(self._cluster)


def cluster_families(cluster: Cluster) -> Iterator[Metric]:
    """Gauges a worker, and counters a policy."""
    labels = ["role", "worker"]
    up = GaugeMetricFamily("trtllm_disagg_worker_up", "1: takes requests", labels=labels)
    active = GaugeMetricFamily("trtllm_disagg_worker_active_requests", "legs in flight", labels=labels)
    blocks = GaugeMetricFamily("trtllm_disagg_worker_index_blocks", "KV blocks known of the worker", labels=labels)
    connections = GaugeMetricFamily("trtllm_disagg_worker_connections", "open connections", labels=labels)
    for worker in cluster.workers:
        place = [worker.role_name, worker.address]
        up.add_metric(place, float(worker.usable))
        active.add_metric(place, worker.active)
        blocks.add_metric(place, 0 if worker.blocks is None else len(worker.blocks.keys))
        connections.add_metric(place, worker.pool.open_connections)
    yield from (up, active, blocks, connections)
    decisions = CounterMetricFamily(
        "trtllm_disagg_policy_decisions", "workers chosen by this policy", labels=["role", "policy"]
    )
    for role, policy in cluster.policies.items():
        decisions.add_metric([role.name.lower(), policy.name], policy.decisions)
    yield decisions
    room = cluster.room
    yield GaugeMetricFamily("trtllm_disagg_waiting_requests", "wait for a place before prefill", room.waiting)
    yield CounterMetricFamily("trtllm_disagg_refused_requests", "not even let into the queue", room.refused)
    yield CounterMetricFamily("trtllm_disagg_expired_requests", "waited in vain", room.expired)
    yield CounterMetricFamily(
        "trtllm_disagg_expired_predictions",
        "blocks expected of a worker and never told of",
        cluster.index.expired_predictions,
    )
    yield GaugeMetricFamily("trtllm_disagg_index_blocks", "distinct KV blocks in the index", len(cluster.index))
    yield GaugeMetricFamily("trtllm_disagg_ready", "1: a request would be served now", float(cluster.ready))
    yield GaugeMetricFamily("trtllm_disagg_degraded_reasons", "see /cluster_info", len(cluster.degraded()))


def render(metrics: RouterMetrics, cluster: Cluster) -> bytes:
    """The exposition text of /prometheus/metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RouterCollector(metrics, cluster))
    return generate_latest(registry)
