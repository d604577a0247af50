"""C123, C125: workers come, go and come back without a client noticing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis
from cluster_rig import SIGCONT, SIGSTOP, Cluster, Load, complete, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(280)]

BODY: dict[str, Any] = {"model": "tiny", "prompt": "What is the capital of France?", "max_tokens": 8, "temperature": 0}
WORKER = {"kv_cache_config": {"max_tokens": 2048, "event_buffer_max_size": 1024}}
CLUSTER_BLOCK = {"heartbeat_interval_sec": 1, "inactive_timeout_sec": 3}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("members")) as rig:
        rig.start_registry()
        settings = WORKER | {"disagg_cluster": {"cluster_uri": rig.registry_uri} | CLUSTER_BLOCK}
        parts = [
            rig.worker("context-0", "CONTEXT", settings),
            rig.worker("context-1", "CONTEXT", settings),
            rig.worker("generation-0", "GENERATION", settings),
            rig.router(),
        ]
        rig.start_all(*parts)
        eventually(lambda: len(members(rig)) == 3, 10, "three workers registered")
        yield rig


def members(rig: Cluster) -> set[str]:
    """host:port of the workers that the router lists."""
    current = httpx.get(rig.parts["router"].url + "/cluster_info", timeout=5).json()["current_workers"]
    return {f"{w['host']}:{w['port']}" for role in current.values() for w in role}


def test_registers_only_when_it_answers(cluster: Cluster) -> None:
    """The address is used the moment it appears in the registry, and always answers."""
    database = redis.Redis.from_url(cluster.registry_uri, decode_responses=True)
    part = cluster.worker("late", "CONTEXT", WORKER)
    before = set(database.scan_iter("/trtllm-disagg/*/workers/*"))
    part.launch()

    def appeared() -> str | None:
        fresh = set(database.scan_iter("/trtllm-disagg/*/workers/*")) - before
        return next(iter(fresh), None)

    key = eventually(appeared, 50, f"registration\n{part.tail()}", every_s=0.005)
    record = json.loads(str(database.get(key)))
    assert set(record) == {"worker_id", "host", "port", "role"}
    address = f"http://{record['host']}:{record['port']}"
    for _ in range(20):
        assert httpx.get(address + "/health", timeout=5).status_code == 200
    part.wait_for_address()
    assert part.stop() == 128 + 15
    assert database.get(key) is None
    database.close()


def test_rolling_restarts_lose_nothing(cluster: Cluster) -> None:
    """SIGTERM and start, over and over, while clients send: the entry goes first, streams finish, nobody fails."""
    router = cluster.parts["router"]
    with Load(router.url, [BODY, BODY | {"stream": True}], clients=4) as load:
        for number in range(6):
            part = cluster.parts[f"context-{number % 2}"]
            code = part.stop()
            assert code == 128 + 15
            part.start()
            eventually(lambda part=part: part.address in members(cluster), 10, "listed again")
    failures = [reply for *_, reply in load.replies if reply.status != 200 or reply.error]
    assert not failures, failures[:3]
    assert len(load.replies) > 50


def test_paused_worker_comes_back(cluster: Cluster) -> None:
    part = cluster.parts["context-1"]
    part.signal(SIGSTOP)
    try:
        eventually(lambda: part.address not in members(cluster), 15, "the lease ran out")
    finally:
        part.signal(SIGCONT)
    eventually(lambda: part.address in members(cluster), 5, "registered again by itself")
    assert complete(cluster.parts["router"].url, BODY).status == 200


def test_flushed_registry_is_refilled(cluster: Cluster) -> None:
    router = cluster.parts["router"]
    want = members(cluster)
    text = complete(router.url, BODY).text
    with Load(router.url, [BODY], clients=2) as load:
        database = redis.Redis.from_url(cluster.registry_uri)
        database.flushall()
        database.close()
        eventually(lambda: registered(cluster) >= want, 4, "all workers registered again")
        eventually(lambda: members(cluster) == want, 4, "the router lists them")
    assert complete(router.url, BODY).text == text
    assert all(reply.text == text for *_, reply in load.replies if reply.status == 200)


def registered(rig: Cluster) -> set[str]:
    """host:port of the workers in the registry itself."""
    database = redis.Redis.from_url(rig.registry_uri, decode_responses=True)
    try:
        records = [json.loads(str(database.get(key) or "{}")) for key in database.scan_iter("*/workers/*")]
        return {f"{record['host']}:{record['port']}" for record in records if record}
    finally:
        database.close()
