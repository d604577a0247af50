"""generation_first between real workers, both legs sent by the test as a router sends them (trtllm-compat §3.3)."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cluster_pair import Pair
from cluster_rig import Cluster, Reply, baseline, complete, eventually, gauges

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

IDS = itertools.count(2**42)


@pytest.fixture(scope="module", params=["DEFAULT", "NIXL"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Cluster(tmp_path_factory.mktemp("ahead"), faults=True) as cluster:
        yield Pair(cluster, request.param, cache_transceiver_config={"backend": request.param})


@pytest.fixture(scope="module")
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def info_endpoint(pair: Pair) -> str:
    info = httpx.get(pair.context.url + "/server_info", timeout=5).json()
    [endpoint] = info["disaggregated_params"]["ctx_info_endpoint"]
    return str(endpoint)


def legs(pair: Pair, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The context leg's body and the generation leg's."""
    number = next(IDS)
    shared = {"disagg_request_id": number, "schedule_style": 1}
    context = {"request_type": "context_only"} | shared
    generation = {"request_type": "generation_only", "ctx_request_id": number, "ctx_info_endpoint": info_endpoint(pair)}
    context_body = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    return (
        context_body | {"disaggregated_params": context},
        body | {"disaggregated_params": generation | shared},
    )


def ask(pair: Pair, clients: ThreadPoolExecutor, body: dict[str, Any], order: str = "together") -> Reply:
    context, generation = legs(pair, body)
    first, second = (generation, context) if order == "generation first" else (context, generation)
    urls = {id(context): pair.context.url, id(generation): pair.generation.url}
    futures: dict[int, Future[Reply]] = {}
    futures[id(first)] = clients.submit(complete, urls[id(first)], first)
    if order != "together":
        time.sleep(0.3)  # the other leg is late by that much
    futures[id(second)] = clients.submit(complete, urls[id(second)], second)
    answer = futures[id(context)].result(30)
    assert answer.status == 200 and answer.finish_reason in ("not_finished", "length", "stop"), answer
    return futures[id(generation)].result(30)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(3, 900) for _ in range(length)]


@pytest.mark.parametrize("order", ["together", "generation first", "context first"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_same_as_aggregated(pair: Pair, clients: ThreadPoolExecutor, order: str, stream: bool) -> None:
    for seed, length in enumerate((1, 32, 100, 700)):
        body = {"model": "tiny", "prompt": prompt(seed, length), "max_tokens": 8, "seed": seed, "temperature": 0.7}
        body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        ours, reference = ask(pair, clients, body, order), complete(pair.aggregated.url, body)
        assert ours.status == 200 and ours.error is None, ours
        assert (ours.token_ids, ours.text) == (reference.token_ids, reference.text)
        assert ours.finish_reason == reference.finish_reason and ours.done
        assert ours.usage is not None and reference.usage is not None
        assert ours.usage["completion_tokens"] == reference.usage["completion_tokens"]
    baseline(*pair.workers)


def test_many_at_once(pair: Pair, clients: ThreadPoolExecutor) -> None:
    shared = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    bodies = [shared | {"prompt": prompt(50 + index, 40 * index + 5)} for index in range(8)]
    before = gauges(pair.generation)["handoffs_fetched_total"]
    with ThreadPoolExecutor(8) as outer:
        replies = list(outer.map(lambda body: ask(pair, clients, body), bodies))
    for body, reply in zip(bodies, replies, strict=True):
        assert reply.token_ids == complete(pair.aggregated.url, body).token_ids
    assert gauges(pair.generation)["handoffs_fetched_total"] - before == 8
    baseline(*pair.workers)


def test_no_such_context_worker_is_made_up_for(pair: Pair) -> None:
    body = {"model": "tiny", "prompt": prompt(7, 90), "max_tokens": 6, "temperature": 0}
    _, generation = legs(pair, body)
    generation["disaggregated_params"]["ctx_info_endpoint"] = "127.0.0.1:9"
    reply = complete(pair.generation.url, generation)
    assert (reply.status, reply.token_ids) == (200, complete(pair.aggregated.url, body).token_ids)
    baseline(*pair.workers)


@pytest.mark.parametrize(
    ("field", "value"), [("ctx_request_id", None), ("ctx_info_endpoint", None), ("ctx_info_endpoint", "nowhere")]
)
def test_what_the_wire_needs(pair: Pair, field: str, value: Any) -> None:
    _, generation = legs(pair, {"model": "tiny", "prompt": prompt(8, 9), "max_tokens": 3})
    generation["disaggregated_params"] |= {field: value, "disagg_request_id": None}
    reply = complete(pair.generation.url, generation)
    assert reply.status == 400 and reply.error is not None and field in reply.error["message"]


@pytest.mark.parametrize("leg", ["context", "generation"])
def test_a_client_that_leaves(pair: Pair, leg: str) -> None:
    """Neither leg holds anything a second after one of them is gone."""
    httpx.put(pair.context.url + "/debug/delays", json={"prefill_chunk": 0.3}, timeout=5)
    try:
        context, generation = legs(pair, {"model": "tiny", "prompt": prompt(9, 900), "max_tokens": 3})
        sends = {"context": (pair.context.url, context), "generation": (pair.generation.url, generation)}
        with ThreadPoolExecutor(1) as pool:
            other = "generation" if leg == "context" else "context"
            stays = pool.submit(complete, *sends[other])
            with pytest.raises(httpx.TimeoutException):
                httpx.post(sends[leg][0] + "/v1/completions", json=sends[leg][1], timeout=1.0)
            answer = stays.result(30)
        assert answer.status == (200 if leg == "context" else 409)
        baseline(*pair.workers)
    finally:
        httpx.put(pair.context.url + "/debug/delays", json={}, timeout=5)


def test_kill_the_context_worker(pair: Pair, clients: ThreadPoolExecutor) -> None:
    """Last in the module: the pair's context worker is another process afterwards."""
    httpx.put(pair.context.url + "/debug/delays", json={"prefill_chunk": 0.2}, timeout=5)
    body = {"model": "tiny", "prompt": prompt(10, 1000), "max_tokens": 6, "temperature": 0}
    context, generation = legs(pair, body)
    answer = clients.submit(complete, pair.generation.url, generation)
    lost = clients.submit(httpx.post, pair.context.url + "/v1/completions", json=context, timeout=30)
    eventually(lambda: gauges(pair.generation)["fetched_blocks_total"] > 0, 10, "first blocks")
    time.sleep(0.5)
    pair.context.kill()
    assert isinstance(lost.exception(30), httpx.HTTPError)
    reply = answer.result(30)
    assert (reply.status, reply.token_ids) == (200, complete(pair.aggregated.url, body).token_ids)
    baseline(pair.generation)
    pair.context.start()
