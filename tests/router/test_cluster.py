"""The table of workers: readiness, pairing, and what becomes of a worker that fails, restarts or leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.errors import NotReady
from kvstore.protocol import Fingerprint, KvEvent, KvEventBatch, ServerInfo, ServerRole, WorkerRecord
from router.cluster import Cluster, records_by_id
from router.config import parse_config
from router.policy import Need
from router.worker import Worker, WorkerState

FINGERPRINT = Fingerprint("m", "t", "float32", "block_nhd", 32, 2, 1, 64, 1)
OTHER = Fingerprint("m", "t", "bfloat16", "block_nhd", 16, 2, 1, 64, 1)


def make_cluster(**keys: Any) -> Cluster:
    return Cluster(parse_config(keys))


def join(
    cluster: Cluster, role: ServerRole, port: int, fingerprint: Fingerprint | None = None, incarnation: str = "i1"
) -> Worker:
    worker = Worker(role, "127.0.0.1", port)
    cluster.add(worker)
    info = ServerInfo(engine="trtllm-disagg", incarnation=incarnation, fingerprint=fingerprint, tokens_per_block=32)
    cluster.describe_worker(worker, info, [f"model-{port}"])
    cluster.set_state(worker, WorkerState.READY)
    return worker


async def test_ready_needs_a_pair() -> None:
    cluster = make_cluster()
    assert not cluster.ready and cluster.why_not_ready() == (
        "the cluster has 0 of 1 context workers and 0 of 1 generation workers"
    )
    join(cluster, ServerRole.CONTEXT, 1)
    assert not cluster.ready and "generation" in (cluster.why_not_ready() or "")
    generation = join(cluster, ServerRole.GENERATION, 2)
    assert cluster.ready and cluster.why_not_ready() is None
    assert cluster.models() == ["model-1", "model-2"]
    cluster.set_state(generation, WorkerState.DOWN, "gone")
    assert not cluster.ready
    with pytest.raises(NotReady) as caught:
        cluster.pick_context(Need())
    assert caught.value.retry_after is not None
    assert "gone" in " ".join(cluster.degraded())


async def test_minimal_instances_hold_back_a_cluster() -> None:
    cluster = make_cluster(disagg_cluster={"cluster_uri": "redis://h:1", "minimal_instances": {"context_servers": 2}})
    join(cluster, ServerRole.CONTEXT, 1)
    join(cluster, ServerRole.GENERATION, 2)
    assert not cluster.ready and "1 of 2 context" in (cluster.why_not_ready() or "")
    join(cluster, ServerRole.CONTEXT, 3)
    assert cluster.ready


async def test_pairs_of_different_fingerprints_are_never_chosen_and_are_named() -> None:
    cluster = make_cluster()
    join(cluster, ServerRole.CONTEXT, 1, FINGERPRINT)
    join(cluster, ServerRole.GENERATION, 2, OTHER)
    assert not cluster.ready and "hand over" in (cluster.why_not_ready() or "")
    [pair] = cluster.mismatches()
    assert pair["context"] == "127.0.0.1:1" and pair["generation"] == "127.0.0.1:2"
    assert pair["differences"] == ["kv_dtype: float32 here, bfloat16 there", "block_size: 32 here, 16 there"]
    fitting = join(cluster, ServerRole.GENERATION, 3, FINGERPRINT)
    other = join(cluster, ServerRole.CONTEXT, 4, OTHER)
    for _ in range(8):
        context = cluster.pick_context(Need())
        generation = cluster.pick_generation(context, Need())
        assert context.fingerprint == generation.fingerprint
        assert (generation is fitting) == (context is not other)


async def test_a_worker_without_fingerprint_pairs_only_with_its_like() -> None:
    cluster = make_cluster()
    join(cluster, ServerRole.CONTEXT, 1, None)
    join(cluster, ServerRole.GENERATION, 2, FINGERPRINT)
    assert not cluster.ready and "127.0.0.1:1 tells none" in str(cluster.mismatches())
    join(cluster, ServerRole.GENERATION, 3, None)
    assert cluster.ready


async def test_exclusion_looks_for_a_whole_pair() -> None:
    cluster = make_cluster()
    first, second = join(cluster, ServerRole.CONTEXT, 1, FINGERPRINT), join(cluster, ServerRole.CONTEXT, 2, OTHER)
    only, _ = join(cluster, ServerRole.GENERATION, 3, FINGERPRINT), join(cluster, ServerRole.GENERATION, 4, OTHER)
    for _ in range(4):
        assert cluster.pick_context(Need(), [only]) is second
    assert cluster.others_left([only]) and not cluster.others_left([only, second])
    with pytest.raises(NotReady):
        cluster.pick_generation(first, Need(), [only])


async def test_a_prefill_is_handed_over_although_its_worker_has_begun_to_leave() -> None:
    """A worker that deregisters between the two legs still holds the pages (C123)."""
    cluster = make_cluster()
    context = join(cluster, ServerRole.CONTEXT, 1, FINGERPRINT)
    generation = join(cluster, ServerRole.GENERATION, 2, FINGERPRINT)
    join(cluster, ServerRole.GENERATION, 3, OTHER)
    assert cluster.pick_context(Need()) is context
    cluster.set_state(context, WorkerState.LEAVING)
    for _ in range(4):
        assert cluster.pick_generation(context, Need()) is generation


async def test_a_new_incarnation_takes_the_index_entries_along() -> None:
    cluster = make_cluster()
    worker = join(cluster, ServerRole.CONTEXT, 1, incarnation="A")
    blocks = worker.blocks
    assert blocks is not None
    cluster.index.apply(blocks, KvEventBatch("A", 0, [KvEvent(cleared=True, stored=[b"x" * 16])]))
    cluster.describe_worker(worker, ServerInfo(incarnation="A"), [])
    assert worker.blocks is blocks and len(cluster.index) == 1
    cluster.describe_worker(worker, ServerInfo(incarnation="B"), [])
    assert len(cluster.index) == 0 and worker.blocks is not None and worker.blocks.incarnation == "B"
    cluster.remove(worker)
    assert worker.blocks is None and repr(cluster.index) == "<BlockIndex blocks=0 workers=0>"


async def test_only_an_unreachable_worker_is_down_at_once() -> None:
    cluster = make_cluster()
    first, second = join(cluster, ServerRole.CONTEXT, 1), join(cluster, ServerRole.CONTEXT, 2)
    cluster.suspect(first, "reset", unreachable=False)
    cluster.suspect(second, "refused", unreachable=True)
    assert first.usable and first.probe_now.is_set()
    assert second.state is WorkerState.DOWN and second.probe_now.is_set()


async def test_a_leaving_worker_takes_nothing_and_stays_leaving() -> None:
    cluster = make_cluster()
    worker = join(cluster, ServerRole.CONTEXT, 1)
    join(cluster, ServerRole.GENERATION, 2)
    cluster.set_state(worker, WorkerState.LEAVING)
    cluster.set_state(worker, WorkerState.READY)
    assert worker.state is WorkerState.LEAVING and not cluster.ready


async def test_degraded_names_what_kv_aware_routing_lacks() -> None:
    block = {"router": {"type": "kv_cache_aware"}}
    cluster = make_cluster(context_servers=block)
    first, second = join(cluster, ServerRole.CONTEXT, 1), join(cluster, ServerRole.CONTEXT, 2)
    first.events_state = "live"
    second.events_state = "GET /kv_events/stream answers 404"
    second.info = ServerInfo(tokens_per_block=64)
    cluster.tokenizer_problem = "no tokenizer.json"
    cluster.registry_state = "down: refused"
    reasons = " | ".join(cluster.degraded())
    for expected in ("127.0.0.1:2: no KV events (GET", "blocks of 64 tokens", "no tokenizer.json", "registry down"):
        assert expected in reasons
    assert "127.0.0.1:1" not in reasons


def test_only_context_and_generation_records_count() -> None:
    records = [WorkerRecord(f"w{role}", "h", 1, role) for role in (0, 1, 2, 100)]
    assert records_by_id(records).keys() == {"w0", "w1"}


async def test_repr_shows_state_and_load() -> None:
    worker = Worker(ServerRole.CONTEXT, "::1", 1)
    assert repr(worker) == "<Worker context [::1]:1 joining active=0>"
    assert worker.url == "http://[::1]:1"
    await asyncio.sleep(0)
