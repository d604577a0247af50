"""The pool among real workers: hits across workers, death of the context worker, master restart (C105, C140)."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster_pair import SHM, pool_settings
from cluster_rig import Cluster, Part, Reply, baseline, complete, eventually, gauges

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("pooled"), faults=True) as rig:
        rig.start_registry()
        rig.start_master()
        settings = pool_settings(rig.directory) | SHM
        # The context worker lends nothing, so that no block dies with it.
        parts = [
            rig.worker("context", "CONTEXT", pool_settings(rig.directory, segment_size=0) | SHM),
            rig.worker("generation", "GENERATION", settings),
            rig.worker("other", None, settings),
            rig.router(),
        ]
        rig.start_all(*parts)
        eventually(lambda: all(pool_is_up(part) for part in parts[:3]), 20, "the pool is joined by all")
        yield rig


def pool_is_up(worker: Part) -> bool:
    return gauges(worker).get("pool_up") == 1


def prompt(start: int, length: int) -> dict[str, Any]:
    ids = [3 + (start * 37 + i * 11) % 900 for i in range(length)]
    return {"model": "tiny", "prompt": ids, "max_tokens": 4, "temperature": 0}


def cached(reply: Reply) -> int:
    assert reply.usage is not None
    return int(reply.usage["prompt_tokens_details"]["cached_tokens"])


def stored(worker: Part) -> float:
    return gauges(worker)["pool_put_blocks_total"]


def computed_and_stored(worker: Part, body: dict[str, Any]) -> Reply:
    """The answer, once the prompt's full blocks have reached the pool."""
    before = stored(worker)
    reply = complete(worker.url, body)
    eventually(lambda: stored(worker) >= before + len(body["prompt"]) // 32, 10, "blocks are stored")
    return reply


@pytest.mark.parametrize("length", [64, 65, 96])
def test_hit_on_another_workers_blocks(cluster: Cluster, length: int) -> None:
    body = prompt(length, length)
    first = computed_and_stored(cluster.parts["context"], body)
    second = complete(cluster.parts["other"].url, body)
    assert second.text == first.text
    assert (cached(first), cached(second)) == (0, (length - 1) // 32 * 32)


def test_context_worker_dies_after_prefill(cluster: Cluster) -> None:
    """The generation worker gets the full blocks from the pool and computes the tail."""
    context, generation, router = (cluster.parts[name] for name in ("context", "generation", "router"))
    body = prompt(1000, 150)
    want = computed_and_stored(cluster.parts["other"], body).text
    httpx.put(router.url + "/debug/delays", json={"after_context": 2}, timeout=5).raise_for_status()
    replies: list[Reply] = []
    client = threading.Thread(target=lambda: replies.append(complete(router.url, body)))
    client.start()
    eventually(lambda: gauges(context)["handoffs_open"] == 1, 5, "prefill is done")
    fetched = gauges(generation)["fetched_blocks_total"]
    context.kill()
    client.join(30)
    httpx.put(router.url + "/debug/delays", json={}, timeout=5).raise_for_status()
    assert replies[0].status == 200
    assert replies[0].text == want
    assert gauges(generation)["fetched_blocks_total"] >= fetched + 4
    baseline(generation)
    context.start()
    eventually(lambda: pool_is_up(context), 20, "the context worker is back")


def test_master_comes_back_empty(cluster: Cluster) -> None:
    port = cluster.master_port()
    body = prompt(2000, 100)
    computed_and_stored(cluster.parts["context"], body)
    cluster.parts["master"].kill()
    during = complete(cluster.parts["router"].url, body)
    assert during.status == 200
    cluster.start_master(rpc_port=port)
    context, other = cluster.parts["context"], cluster.parts["other"]
    numbers = itertools.count(3000)

    def hit() -> bool:
        """A prompt never seen before, computed by one worker, is found by the other."""
        fresh = prompt(next(numbers), 100)
        first, before = complete(context.url, fresh), stored(context)
        with contextlib.suppress(AssertionError):
            eventually(lambda: stored(context) > before, 0.5)
        second = complete(other.url, fresh)
        assert second.text == first.text
        return cached(second) == 96

    eventually(hit, 10, "puts and gets work again")
