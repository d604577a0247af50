"""Three workers with addresses of their own: NIXL and Mooncake over TCP, and a cable that is pulled in mid-transfer."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cluster_rig import Cluster, Part, Reply, baseline, complete, eventually, gauges
from namespace_rig import Namespaces, why_not

REASON = why_not()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(180),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

IDS = itertools.count(2**45)
LEASE_MS = 4000


class Trio:
    def __init__(self, cluster: Cluster, hosts: Namespaces, backend: str) -> None:
        self.hosts = hosts
        self.backend = backend
        settings = {
            "cache_transceiver_config": {"backend": backend, "kv_transfer_timeout_ms": LEASE_MS},
            "fetch_timeout": 2.0,
        }
        # Network namespaces of one machine: without this, UCX would find that it can read the other's memory.
        environment = {"UCX_TLS": "tcp"}
        self.workers = [hosts.worker(cluster, host, settings, environment) for host in range(3)]
        cluster.start_all(*self.workers)


@pytest.fixture(scope="module", params=["NIXL", "MOONCAKE"])
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    pytest.importorskip("nixl" if request.param == "NIXL" else "mooncake")
    with Namespaces(3) as hosts, Cluster(tmp_path_factory.mktemp("hosts"), faults=True) as cluster:
        yield Trio(cluster, hosts, request.param)


def body_of(seed: int, length: int) -> dict[str, Any]:
    rng = random.Random(seed)
    prompt = [rng.randint(3, 900) for _ in range(length)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0}


def prefill(worker: Part, body: dict[str, Any]) -> dict[str, Any]:
    """The decode leg's body."""
    params = {"request_type": "context_only", "disagg_request_id": next(IDS)}
    sent = body | {"disaggregated_params": params}
    answer = httpx.post(worker.url + "/v1/completions", json=sent, timeout=30).json()
    return body | {
        "disaggregated_params": answer["choices"][0]["disaggregated_params"] | {"request_type": "generation_only"}
    }


def decode(worker: Part, body: dict[str, Any]) -> Reply:
    return complete(worker.url, body, timeout=60)


@contextlib.contextmanager
def cut_in_mid_transfer(trio: Trio, source: Part, target: Part, body: dict[str, Any]) -> Iterator[Future[Reply]]:
    """`target`'s answer to a hand-off from `source`, whose cable is out inside the block."""
    handed = prefill(source, body)
    trio.hosts.slow_down(0, 2.0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(decode, target, handed)
        eventually(lambda: gauges(target)["requests_fetching"] == 1, 5, "the fetch has begun")
        time.sleep(0.3)
        with trio.hosts.cut(0):
            yield answer


def test_every_pair(trio: Trio) -> None:
    for seed, (source, target) in enumerate(itertools.permutations(trio.workers, 2)):
        body = body_of(seed, 150)
        before = gauges(target)["fetched_blocks_total"]
        reply = decode(target, prefill(source, body))
        assert (reply.status, reply.token_ids) == (200, complete(source.url, body).token_ids)
        assert gauges(target)["fetched_blocks_total"] - before == 5
    baseline(*trio.workers)


def test_a_cable_pulled_in_mid_transfer(trio: Trio) -> None:
    source, target, other = trio.workers
    body = body_of(100, 1200)
    reference = complete(other.url, body)
    with cut_in_mid_transfer(trio, source, target, body) as answer:
        begun = time.monotonic()
        reply = answer.result(60)
        assert (reply.status, reply.token_ids) == (200, reference.token_ids)
        assert time.monotonic() - begun < 20
        quarantined = gauges(target).get("kv_blocks_quarantined", 0)
        if trio.backend == "MOONCAKE":
            assert quarantined == 0, "the reading process is gone, and with it all that could write"
        # The others go on meanwhile.
        aside = body_of(101, 150)
        assert decode(other, prefill(target, aside)).token_ids == complete(other.url, aside).token_ids
    trio.hosts.full_speed(0)
    baseline(*trio.workers, limit_s=40)
    again = body_of(102, 150)
    before = gauges(target)["fetched_blocks_total"]
    assert decode(target, prefill(source, again)).token_ids == complete(other.url, again).token_ids
    assert gauges(target)["fetched_blocks_total"] - before == 5
    baseline(*trio.workers)


def test_a_cable_that_stays_out(trio: Trio) -> None:
    """Last in the module. The quarantine ends by the transport's own death certificate."""
    source, target, other = trio.workers
    body = body_of(200, 1200)
    reference = complete(other.url, body)
    with cut_in_mid_transfer(trio, source, target, body) as answer:
        reply = answer.result(60)
        assert (reply.status, reply.token_ids) == (200, reference.token_ids)
        baseline(target, limit_s=60)
