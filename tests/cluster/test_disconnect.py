"""C085: a client that goes away at any stage leaves nothing behind on either worker."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from cluster_pair import Pair
from cluster_rig import Part, baseline, complete, eventually, gauges

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

LONG = [7 + i % 800 for i in range(600)]


def delay(part: Part, **seconds: float) -> None:
    httpx.put(part.url + "/debug/delays", json=seconds, timeout=5).raise_for_status()


@pytest.fixture(autouse=True)
def _no_delays(shm_pair: Pair) -> Iterator[None]:
    yield
    for part in (shm_pair.router, *shm_pair.workers):
        delay(part)


def send(router: Part, body: dict[str, Any]) -> socket.socket:
    """The request on a raw socket, so that the test decides when it closes."""
    data = json.dumps(body).encode()
    host, port = router.address.split(":")
    client = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    client.sendall(head.encode() + b"\r\n\r\n" + data)
    return client


def seen(part: Part, name: str, least: float = 1) -> Callable[[], bool]:
    return lambda: gauges(part)[name] >= least


def arrange(pair: Pair, stage: str) -> Callable[[], Any]:
    """Slow the cluster so that a request stays in `stage`; returns the check that it is there."""
    context, generation = pair.context, pair.generation
    match stage:
        case "queued at router":
            delay(pair.router, before_context=3)
            return lambda: in_flight(pair.router) >= 1
        case "prefill":
            delay(context, prefill_chunk=0.3)
            return seen(context, "requests_running")
        case "prefill done, not fetched":
            delay(pair.router, after_context=3)
            return seen(context, "handoffs_open")
        case "fetching":
            delay(generation, fetch=3)
            return seen(generation, "requests_fetching")
        case "decoding":
            delay(generation, step=0.05)
            return seen(generation, "requests_running")
    raise AssertionError(stage)


def in_flight(router: Part) -> int:
    """Legs that the router has open or is about to open."""
    return sum(w["active_requests"] for w in httpx.get(router.url + "/cluster_info", timeout=5).json()["workers"])


STAGES = ["queued at router", "prefill", "prefill done, not fetched", "fetching", "decoding"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", STAGES)
def test_disconnect_frees_everything(shm_pair: Pair, stage: str, stream: bool) -> None:
    there = arrange(shm_pair, stage)
    for repeat in range(4):
        body = {"model": "tiny", "prompt": [repeat + 1, *LONG], "max_tokens": 400, "ignore_eos": True, "stream": stream}
        client = send(shm_pair.router, body)
        eventually(there, 5, f"a request in stage {stage}")
        if stage == "decoding" and stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        client.close()
        # A page being filled belongs to the fetch until the fetch ends, so that stage waits for its delay.
        baseline(*shm_pair.workers, limit_s=5 if stage == "fetching" else 2)
        eventually(lambda: in_flight(shm_pair.router) == 0, 2, "router in-flight back to 0")
    for part in (shm_pair.router, *shm_pair.workers):
        delay(part)
    reply = complete(shm_pair.router.url, {"model": "tiny", "prompt": LONG[:40], "max_tokens": 2, "temperature": 0})
    assert reply.status == 200
