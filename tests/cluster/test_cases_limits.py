"""C008, C009, C078, C084, C110: the edge of the context and of the batch, reuse switched off, on real servers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cluster_pair import SHM, Pair
from cluster_rig import Cluster, Part, baseline, complete, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

LIMIT = 64
SIDES = ["aggregated", "router"]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A context of 64 tokens, in steps of at most 32."""
    with Cluster(tmp_path_factory.mktemp("limits")) as cluster:
        yield Pair(cluster, "shm", max_seq_len=LIMIT, max_num_tokens=32)


def ids(length: int) -> list[int]:
    return list(range(5, 5 + length))


def ask(part: Part, prompt: Any, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "temperature": 0} | fields
    return httpx.post(part.url + "/v1/completions", json=body, timeout=30)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("side", SIDES)
def test_a_prompt_beyond_the_context(short: Pair, side: str, stream: bool) -> None:
    """C008: 400 with both numbers, in the body also of a stream; the next request is served, and nothing is held."""
    part = getattr(short, side)
    refused = ask(part, ids(100), max_tokens=8, stream=stream)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "100" in error["message"] and str(LIMIT) in error["message"]
    assert ask(part, "Hello", max_tokens=8).status_code == 200
    assert [each.health() for each in (short.router, *short.workers, short.aggregated)] == [200] * 4
    baseline(*short.workers)


@pytest.mark.parametrize("side", SIDES)
def test_the_edge_of_the_context(short: Pair, side: str) -> None:
    """C009: 63 tokens leave room for one, 64 for none; a limit that was asked for and does not fit is refused by name,
    and one that was not is what fits."""
    part = getattr(short, side)
    last = ask(part, ids(LIMIT - 1), max_tokens=1, ignore_eos=True).json()
    assert (last["choices"][0]["finish_reason"], last["usage"]["completion_tokens"]) == ("length", 1)
    assert ask(part, ids(LIMIT), max_tokens=1).json()["error"]["code"] == "context_length_exceeded"
    over = ask(part, ids(LIMIT - 4), max_tokens=100, ignore_eos=True)
    assert (over.status_code, over.json()["error"]["param"]) == (400, "max_tokens")
    cut = ask(part, ids(LIMIT - 4), ignore_eos=True).json()
    assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 4)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}], "ignore_eos": True}
    answer = httpx.post(part.url + "/v1/chat/completions", json=chat, timeout=30).json()
    assert answer["usage"]["total_tokens"] == LIMIT and answer["choices"][0]["finish_reason"] == "length"
    baseline(*short.workers)


def test_no_reuse_is_no_reuse_and_is_not_silent(tmp_path_factory: pytest.TempPathFactory) -> None:
    """C110: nothing is ever cached, and a router that would route by the cache tells that load alone decides."""
    with Cluster(tmp_path_factory.mktemp("reuse")) as cluster:
        cluster.start_registry()
        settings = SHM | {"kv_cache_config": {"max_tokens": 2048, "tokens_per_block": 32, "enable_block_reuse": False}}
        workers = [cluster.worker(role, role.upper(), settings) for role in ("context", "generation")]
        router = cluster.router({"context_servers": {"router": {"type": "kv_cache_aware"}}})
        cluster.start_all(*workers, router)
        for _ in range(3):
            usage = ask(router, ids(100), max_tokens=3).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0

        def told() -> bool:
            reasons = httpx.get(router.url + "/cluster_info", timeout=5).json()["degraded"]
            return any("no KV events" in reason for reason in reasons)

        eventually(told, 10, "the router says that it has no KV events")
        baseline(*workers)


def test_long_prompts_and_a_batch_of_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    """C078, C084: prompts in chunks of 32, many for a generation worker that serves one at a time."""
    rng = random.Random(78)
    bodies: list[dict[str, Any]] = [
        {"prompt": [rng.randint(3, 900) for _ in range(length)], "max_tokens": 6 + length % 3}
        for length in (150, 5, 97, 64, 33, 128, 1, 70)
    ]
    with Cluster(tmp_path_factory.mktemp("one")) as cluster:
        cluster.start_registry()
        chunked = SHM | {"max_num_tokens": 32, "enable_chunked_prefill": True}
        context = cluster.worker("context", "CONTEXT", chunked | {"max_batch_size": 4})
        generation = cluster.worker("generation", "GENERATION", SHM | {"max_batch_size": 1})
        reference, router = cluster.worker("aggregated", None), cluster.router()
        cluster.start_all(context, generation, reference, router)

        def same(body: dict[str, Any]) -> bool:
            request = {"model": "tiny", "temperature": 0, "ignore_eos": True, **body}
            ours, expected = complete(router.url, request), complete(reference.url, request)
            return ours.status == 200 and (ours.token_ids, ours.text) == (expected.token_ids, expected.text)

        with ThreadPoolExecutor(8) as clients:
            assert all(clients.map(same, bodies))
        baseline(context, generation)
