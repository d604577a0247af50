from __future__ import annotations

import pytest
from fake_worker import fail_with
from prometheus_client.parser import text_string_to_metric_families
from router_rig import COMPLETIONS, cluster

from router.metrics import SHORT, Histogram


async def test_the_exposition_text() -> None:
    async with cluster() as (router, [ctx], [gen]):
        await router.post(COMPLETIONS, prompt="hi")
        await router.post(COMPLETIONS, prompt="hi", stream=True)
        await router.client.post(COMPLETIONS, content=b"[")
        gen.scripts[COMPLETIONS] = fail_with(500)
        await router.post(COMPLETIONS, prompt="hi")
        answer = await router.client.get("/prometheus/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    expected = {
        "total_requests_total": 4,
        "stream_requests_total": 1,
        "nonstream_requests_total": 2,
        "validation_exceptions_total": 1,
        "http_exceptions_total": 2,
        "internal_errors_total": 0,
        "total_responses_total": 2,
        "ctx_total_requests_total": 3,
        "ctx_completed_requests_total": 3,
        "gen_total_requests_total": 3,
        "gen_completed_requests_total": 2,
        "gen_error_requests_total": 1,
        "gen_retry_requests_total": 0,
        "queue_latency_seconds_count": 3,
        "ctx_first_token_latency_seconds_count": 3,
        "gen_complete_latency_seconds_count": 2,
        "gen_per_token_latency_seconds_count": 1,
        "trtllm_disagg_ready": 1,
    }
    assert {name: samples[(name,)] for name in expected} == expected
    assert samples[("trtllm_disagg_worker_up", *sorted(("context", ctx.address)))] == 1
    assert samples[("trtllm_disagg_worker_active_requests", *sorted(("generation", gen.address)))] == 0
    assert samples[("trtllm_disagg_policy_decisions_total", "context", "round_robin")] == 3


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (0.001, 0), (0.0011, 1), (2560, 21), (9999, 22)])
def test_buckets_are_upper_bounds(seconds: float, bucket: int) -> None:
    histogram = Histogram(SHORT)
    histogram.observe(seconds)
    assert histogram.counts.index(1) == bucket and histogram.count == 1
    family = histogram.family("x_seconds", "x")
    assert family.samples[-2].name == "x_seconds_count" and family.samples[-2].value == 1
