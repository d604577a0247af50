"""Prometheus metrics of a worker: TensorRT-LLM's names (`trtllm_`) for requests and the cache, and ours
(`trtllm_disagg_`) for what it has no name for. Labels are constants of the process or closed sets.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.messages import HandoffFetched, Stats, Timing
from kvstore.errors import ServingError
from openai_api.engine_port import Engine
from openai_api.service import Generation

_SHORT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ENGINE_TYPE = "trtllm-disagg"

_COUNTERS = {
    "steps": "Engine steps",
    "generated_tokens": "Tokens sampled here",
    "blocks_evicted": "Reusable KV blocks given to a new owner",
    "preemptions": "Times that a running choice gave up its KV blocks",
    "tokens_recomputed": "Tokens computed again after a preemption",
    "blocks_offloaded": "KV blocks saved to host memory",
    "blocks_onboarded": "KV blocks brought back from host memory",
    "handoffs_offered": "Hand-offs whose blocks were pinned here",
    "handoffs_done": "Hand-offs acknowledged by their reader",
    "handoffs_released": "Hand-offs dropped before they were fetched",
    "handoffs_expired": "Hand-offs whose lease ran out",
    "fetch_bytes": "KV bytes fetched from other workers or the pool",
    "fetch_blocks": "KV blocks fetched from other workers or the pool",
    "pool_put_blocks": "KV blocks put into the Mooncake pool",
    "pool_put_failures": "KV blocks that the pool did not take",
}
_RENAMED = {"fetch_bytes": "fetched_bytes", "fetch_blocks": "fetched_blocks", "blocks_evicted": "kv_evictions"}
_GAUGES = {
    "blocks_total": "KV blocks of the paged pool",
    "blocks_used": "KV blocks of running or fetching requests",
    "blocks_reusable": "KV blocks kept as prefix cache, free for new requests",
    "blocks_pinned": "KV blocks held by open hand-offs and unfinished puts",
    "blocks_quarantined": "KV blocks that a read which was given up may still write to",
    "blocks_free": "KV blocks without content",
    "host_blocks_total": "KV blocks that host memory has room for",
    "host_blocks_used": "KV blocks kept in host memory",
    "requests_paused": "Requests that were preempted and wait to be computed again",
    "requests_running": "Requests in the running batch",
    "requests_waiting": "Requests in the waiting queue",
    "requests_fetching": "Requests whose KV is being fetched",
    "handoffs_open": "Hand-offs offered and not yet ended",
}


class WorkerMetrics:
    """Fed by the service as its Observer, and by the engine's Stats when scraped."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name, "engine_type": _ENGINE_TYPE}
        self._registry = CollectorRegistry(auto_describe=False)
        labels = list(self._labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"trtllm_{name}", text, labels, buckets=buckets, registry=self._registry)
            return metric.labels(**self._labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"trtllm_{name}", text, labels, registry=self._registry).labels(**self._labels)

        self._latency = histogram("e2e_request_latency_seconds", "From the request's arrival to its end", _LONG)
        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token", _SHORT)
        self._per_token = histogram("time_per_output_token_seconds", "Mean of one request's later tokens", _PER_TOKEN)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step", _SHORT)
        self._prompt = counter("prompt_tokens", "Prompt tokens of finished requests")
        self._cached = counter("prompt_cached_tokens", "Prompt tokens that were not computed for their request")
        self._generated = counter("generation_tokens", "Generated tokens of finished requests")
        self._errors = counter("request_error", "Requests that ended in an error")
        self._success = Counter(
            "trtllm_request_success", "Finished choices", [*labels, "finished_reason"], registry=self._registry
        )
        self._requests = Counter("trtllm_disagg_requests", "Requests that reached the engine", registry=self._registry)
        self._fetched = Counter("trtllm_disagg_handoffs_fetched", "Hand-offs fetched here", registry=self._registry)
        self._failed_by_code = Counter(
            "trtllm_disagg_request_errors", "Requests that ended in an error", ["code"], registry=self._registry
        )
        self._registry.register(_EngineStats(engine, self._labels))

    # ------------------------------------------------------------ events

    def submitted(self) -> None:
        self._requests.inc()

    def first_token(self, seconds: float, timing: Timing | None) -> None:
        self._first_token.observe(seconds)
        if timing is not None:
            self._queue.observe(timing.scheduled)

    def finished(self, generation: Generation, seconds: float) -> None:
        usage = generation.usage
        self._latency.observe(seconds)
        if generation.continues:  # so that the sum over a cluster's workers is what its clients are told
            self._generated.inc(max(usage.completion_tokens - len(generation.texts), 0))
        else:
            self._prompt.inc(usage.prompt_tokens)
            self._cached.inc(usage.cached_tokens)
            self._generated.inc(usage.completion_tokens)
        later = usage.completion_tokens - len(generation.texts)
        if later > 0 and generation.timing is not None:
            self._per_token.observe(max(seconds - generation.timing.first_token, 0) / later)
        for text in generation.texts:
            self._success.labels(**self._labels, finished_reason=text.finish_reason or "not_finished").inc()

    def failed(self, error: ServingError) -> None:
        self._errors.inc()
        self._failed_by_code.labels(error.code).inc()

    def handoff_fetched(self, report: HandoffFetched) -> None:
        if report.ok:
            self._fetched.inc()

    # ------------------------------------------------------------ reads

    def prometheus(self) -> bytes:
        return generate_latest(self._registry)


class _EngineStats(Collector):
    """The engine's own counts, read at scrape time."""

    def __init__(self, engine: Engine, labels: dict[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield from self._named_by_trtllm(stats)
        values = msgspec.structs.asdict(stats)
        for field, text in _GAUGES.items():
            name = f"kv_{field}" if field.startswith("blocks_") else field
            yield GaugeMetricFamily(f"trtllm_disagg_{name}", text, value=values[field])
        for field, text in _COUNTERS.items():
            yield CounterMetricFamily(f"trtllm_disagg_{_RENAMED.get(field, field)}", text, value=values[field])
        sources = CounterMetricFamily(
            "trtllm_disagg_prompt_tokens", "Prompt tokens by where their KV came from", labels=["source"]
        )
        for source in ("computed", "local", "remote", "pool"):
            sources.add_metric([source], values[f"prompt_tokens_{source}"])
        yield sources
        failures = CounterMetricFamily("trtllm_disagg_handoff_failures", "Fetches that failed", labels=["cause"])
        for cause, count in stats.fetch_failures.items():
            failures.add_metric([cause], count)
        yield failures
        dropped = CounterMetricFamily(
            "trtllm_disagg_records_dropped", "Records of lists that nobody read in time", labels=["list"]
        )
        for name, count in self._engine.feeds.dropped.items():
            dropped.add_metric([name], count)
        yield dropped
        up = float(stats.pool_state == "up")
        yield GaugeMetricFamily("trtllm_disagg_pool_up", "1 while the Mooncake pool works", value=up)
        alive = float(self._engine.alive)
        yield GaugeMetricFamily("trtllm_disagg_engine_up", "1 while the engine process lives", value=alive)

    def _named_by_trtllm(self, stats: Stats) -> Iterator[Metric]:
        total = stats.blocks_total or 1
        used = stats.blocks_used + stats.blocks_pinned
        for name, text, value in (
            ("kv_cache_max_blocks", "KV blocks of the paged pool", stats.blocks_total),
            ("kv_cache_free_blocks", "KV blocks that a new request can have", stats.blocks_total - used),
            ("kv_cache_used_blocks", "KV blocks that requests or hand-offs hold", used),
            ("kv_cache_tokens_per_block", "Tokens of one KV block", self._engine.ready.block_size),
            ("kv_cache_utilization", "Used part of the KV pool, 0 to 1", used / total),
            ("kv_cache_hit_rate", "Prompt tokens not computed, 0 to 1", _hit_rate(stats)),
            ("num_requests_running", "Requests in the running batch", stats.requests_running),
            ("num_requests_waiting", "Requests in the waiting queue", stats.requests_waiting),
        ):
            family = GaugeMetricFamily(f"trtllm_{name}", text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family


def _hit_rate(stats: Stats) -> float:
    reused = stats.prompt_tokens_local + stats.prompt_tokens_remote + stats.prompt_tokens_pool
    seen = reused + stats.prompt_tokens_computed
    return reused / seen if seen else 0.0
