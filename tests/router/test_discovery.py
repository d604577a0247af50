"""Probing, joining, leaving, and KV events of workers, against fake workers on real sockets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fake_worker import Call, FakeWorker, answer_generation, fake_workers, hang_until
from running_router import RunningRouter, eventually, running_router, static_config

from kvstore.protocol import ServerRole
from router.config import parse_config
from router.worker import Worker

PATH = "/v1/completions"
FINGERPRINT = {
    "model": "m",
    "tokenizer": "t",
    "kv_dtype": "float32",
    "layout": "block_nhd",
    "block_size": 32,
    "num_layers": 2,
    "num_kv_heads": 1,
    "head_dim": 64,
    "tp_size": 1,
}


def worker_of(router: RunningRouter, fake: FakeWorker) -> Worker:
    return next(worker for worker in router.router.cluster.workers if worker.port == fake.port)


@contextlib.asynccontextmanager
async def registry_router(*, fast: bool = True) -> AsyncIterator[RunningRouter]:
    """A router that hosts the registry itself."""
    cluster = {"cluster_uri": "http://127.0.0.1:1", "cluster_name": "c", "minimal_instances": {"context_servers": 1}}
    async with running_router(parse_config({"disagg_cluster": cluster}), wait_ready=False) as router:
        yield router


async def register(router: RunningRouter, fake: FakeWorker, role: ServerRole, worker_id: str) -> None:
    record = {"worker_id": worker_id, "host": "127.0.0.1", "port": fake.port, "role": int(role)}
    key = f"/trtllm-disagg/c/workers/{worker_id}"
    answer = await router.client.post("/set", json={"key": key, "value": json.dumps(record), "ttl": 60})
    assert answer.status_code == 200


async def deregister(router: RunningRouter, worker_id: str) -> None:
    answer = await router.client.delete("/delete", params={"key": f"/trtllm-disagg/c/workers/{worker_id}"})
    assert answer.status_code == 200


# ---------------------------------------------------------------- static urls


async def test_the_router_serves_503_until_its_workers_answer() -> None:
    ctx, gen = FakeWorker("context"), FakeWorker("generation")
    gen.health = 503
    async with fake_workers(ctx, gen), running_router(static_config([ctx], [gen]), wait_ready=False) as router:
        await eventually(lambda: worker_of(router, ctx).usable)
        answer = await router.client.get("/health")
        assert answer.status_code == 503 and "retry-after" in answer.headers
        assert answer.json()["error"]["code"] == "not_ready"
        assert (await router.post(PATH, prompt="x")).status_code == 503
        assert (await router.client.get("/v1/models")).status_code == 503
        gen.health = 200
        await eventually(lambda: router.router.cluster.ready)
        assert (await router.client.get("/health")).status_code == 200
        assert (await router.post(PATH, prompt="x")).status_code == 200


async def test_a_worker_of_another_make_has_no_server_info() -> None:
    ctx, gen = FakeWorker("context"), FakeWorker("generation")
    ctx.server_info = gen.server_info = None
    async with fake_workers(ctx, gen), running_router(static_config([ctx], [gen])) as router:
        assert (await router.post(PATH, prompt="x")).status_code == 200
        assert not worker_of(router, ctx).releases


@pytest.mark.parametrize("info", [{"role": "generation"}, {"fingerprint": {"model": 7}}, {"tokens_per_block": "x"}])
async def test_a_worker_that_says_something_else_does_not_join(info: dict[str, Any]) -> None:
    ctx, gen = FakeWorker("context"), FakeWorker("generation")
    assert ctx.server_info is not None
    ctx.server_info |= info
    async with fake_workers(ctx, gen), running_router(static_config([ctx], [gen]), wait_ready=False) as router:
        await eventually(lambda: worker_of(router, gen).usable)
        await eventually(lambda: worker_of(router, ctx).state_reason != "has not answered yet")
        assert not worker_of(router, ctx).usable
        reasons = (await router.client.get("/cluster_info")).json()["workers"][0]["state_reason"]
        assert "role" in str(info) or "/server_info" in reasons


async def test_a_restarted_worker_is_known_by_its_incarnation() -> None:
    ctx, gen = FakeWorker("context", incarnation="A"), FakeWorker("generation")
    async with fake_workers(ctx, gen), running_router(static_config([ctx], [gen])) as router:
        worker, port = worker_of(router, ctx), ctx.port
        assert worker.incarnation == "A"
        await ctx.stop()
        await router.post(PATH, prompt="x")
        assert not worker.usable
        assert ctx.server_info is not None
        ctx.server_info["incarnation"] = "B"
        await ctx.start(port)
        await eventually(lambda: worker.usable)
        assert worker.incarnation == "B" and worker.blocks is not None and worker.blocks.incarnation == "B"


async def test_cluster_info_has_upstreams_shape_and_ours() -> None:
    ctx = FakeWorker("context", incarnation="A", fingerprint=FINGERPRINT, tokens_per_block=32, transfers=["shm"])
    gen = FakeWorker("generation", incarnation="G", fingerprint=FINGERPRINT | {"kv_dtype": "bfloat16"})
    async with fake_workers(ctx, gen), running_router(static_config([ctx], [gen]), wait_ready=False) as router:
        await eventually(lambda: worker_of(router, ctx).usable and worker_of(router, gen).usable)
        info = (await router.client.get("/cluster_info")).json()
        assert info["is_ready"] is False
        [record] = info["current_workers"]["context_servers"]
        assert record == {
            "worker_id": f"CONTEXT-{ctx.address}",
            "host": "127.0.0.1",
            "port": ctx.port,
            "role": 0,
        }
        assert info["minimal_instances"] == {"context_servers": 1, "generation_servers": 1}
        assert info["incompatible_pairs"][0]["differences"] == ["kv_dtype: float32 here, bfloat16 there"]
        worker = info["workers"][0]
        assert worker["incarnation"] == "A" and worker["transfers"] == ["shm"] and worker["state"] == "ready"
        assert info["policies"]["context"]["type"] == "round_robin"


# ---------------------------------------------------------------- registry


async def test_workers_join_and_leave_through_the_registry() -> None:
    ctx, gen, late = FakeWorker("context"), FakeWorker("generation"), FakeWorker("generation")
    async with fake_workers(ctx, gen, late), registry_router() as router:
        assert (await router.post(PATH, prompt="x")).status_code == 503
        await register(router, ctx, ServerRole.CONTEXT, "c1")
        await register(router, gen, ServerRole.GENERATION, "g1")
        await eventually(lambda: router.router.cluster.ready)
        assert (await router.post(PATH, prompt="x")).status_code == 200
        await register(router, late, ServerRole.GENERATION, "g2")
        await eventually(lambda: len(router.router.cluster.workers) == 3 and worker_of(router, late).usable)
        for _ in range(2):
            await router.post(PATH, prompt="x")
        assert gen.legs() and late.legs()
        info = (await router.client.get("/cluster_info")).json()
        assert info["registry"]["state"] == "up"


async def test_a_worker_that_leaves_finishes_what_it_has() -> None:
    """C123: the record goes first, the open stream ends well, and new requests go elsewhere."""
    ctx, old, new = FakeWorker("context"), FakeWorker("generation"), FakeWorker("generation")
    go_on = asyncio.Event()
    async with fake_workers(ctx, old, new), registry_router() as router:
        await register(router, ctx, ServerRole.CONTEXT, "c1")
        await register(router, old, ServerRole.GENERATION, "g1")
        await eventually(lambda: router.router.cluster.ready)
        old.scripts[PATH] = hang_until(go_on, answer_generation)
        request = asyncio.ensure_future(router.post(PATH, prompt="x"))
        await eventually(lambda: len(old.legs()) == 1)
        await register(router, new, ServerRole.GENERATION, "g2")
        await eventually(lambda: len(router.router.cluster.partners.get(router.router.cluster.contexts[0], ())) == 2)
        await deregister(router, "g1")
        await eventually(lambda: worker_of(router, old).state == "leaving")
        for _ in range(3):
            assert (await router.post(PATH, prompt="x")).status_code == 200
        assert len(old.legs()) == 1 and len(new.legs()) == 3
        go_on.set()
        assert (await request).status_code == 200
        await eventually(lambda: len(router.router.cluster.workers) == 2)
        await eventually(lambda: old.connections == 0)


async def test_a_worker_that_registers_again_is_another_worker() -> None:
    ctx, gen = FakeWorker("context", incarnation="A"), FakeWorker("generation")
    async with fake_workers(ctx, gen), registry_router() as router:
        await register(router, ctx, ServerRole.CONTEXT, "c1")
        await register(router, gen, ServerRole.GENERATION, "g1")
        await eventually(lambda: router.router.cluster.ready)
        await deregister(router, "c1")
        await eventually(lambda: not router.router.cluster.ready)
        await register(router, ctx, ServerRole.CONTEXT, "c2")
        await eventually(lambda: router.router.cluster.ready)
        assert [worker.worker_id for worker in router.router.cluster.workers] == ["g1", "c2"]


# ---------------------------------------------------------------- KV events


def key(number: int) -> bytes:
    return bytes([number]) * 16


class EventSource:
    """GET /kv_events/stream of a fake worker: each connection gets a snapshot, then what the test pushes."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.held: list[bytes] = []
        self.seq = 0
        self.opened = 0
        self._queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def push(self, seq: int | None = None, incarnation: str | None = None, **event: Any) -> None:
        self.seq = self.seq + 1 if seq is None else seq
        self._queue.put_nowait({"incarnation": incarnation or self.incarnation, "seq": self.seq, "events": [event]})

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def script(self, call: Call) -> None:
        self.opened += 1
        self.seq = 0
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n")
        stored = [base64.b64encode(block).decode() for block in self.held]
        opening = {"incarnation": self.incarnation, "seq": 0, "events": [{"cleared": True, "stored": stored}]}
        await call.chunk(json.dumps(opening).encode() + b"\n")
        while (batch := await self._queue.get()) is not None:
            event = batch["events"][0]
            for name in ("stored", "removed"):
                if name in event:
                    event[name] = [base64.b64encode(block).decode() for block in event[name]]
            await call.chunk(json.dumps(batch).encode() + b"\n")
        await call.send(b"0\r\n\r\n")


@contextlib.asynccontextmanager
async def event_cluster() -> AsyncIterator[tuple[RunningRouter, FakeWorker, EventSource]]:
    ctx = FakeWorker("context", incarnation="A", tokens_per_block=32)
    gen = FakeWorker("generation", incarnation="G", tokens_per_block=32)
    source = EventSource("A")
    ctx.scripts["/kv_events/stream"] = source.script
    async with fake_workers(ctx, gen):
        config = static_config([ctx], [gen])
        urls = {"num_instances": 1, "urls": [ctx.address], "router": {"type": "kv_cache_aware"}}
        config = parse_config(
            {"context_servers": urls, "generation_servers": {"num_instances": 1, "urls": [gen.address]}}
        )
        async with running_router(config) as router:
            yield router, ctx, source


async def test_events_fill_the_index_and_a_gap_starts_afresh() -> None:
    async with event_cluster() as (router, ctx, source):
        index, worker = router.router.cluster.index, worker_of(router, ctx)
        await eventually(lambda: worker.events_state == "live")
        source.push(stored=[key(1), key(2)])
        await eventually(lambda: len(index) == 2)
        source.push(removed=[key(2)])
        await eventually(lambda: len(index) == 1)
        source.held = [key(7), key(8), key(9)]
        source.push(seq=9, stored=[key(3)])
        await eventually(lambda: source.opened == 2 and len(index) == 3)
        assert worker.blocks is not None and worker.blocks.keys == set(source.held)
        metrics = (await router.client.get("/prometheus/metrics")).text
        assert f'trtllm_disagg_worker_index_blocks{{role="context",worker="{ctx.address}"}} 3.0' in metrics


async def test_a_stream_that_ends_is_opened_again() -> None:
    async with event_cluster() as (router, ctx, source):
        await eventually(lambda: worker_of(router, ctx).events_state == "live")
        source.end()
        await eventually(lambda: source.opened == 2)
        await eventually(lambda: worker_of(router, ctx).events_state == "live")


async def test_late_events_of_an_old_incarnation_change_nothing() -> None:
    async with event_cluster() as (router, ctx, source):
        index, worker = router.router.cluster.index, worker_of(router, ctx)
        await eventually(lambda: worker.events_state == "live")
        source.held = [key(1)]
        source.end()
        await eventually(lambda: source.opened == 2 and len(index) == 1)
        assert ctx.server_info is not None
        ctx.server_info["incarnation"] = source.incarnation = "B"
        source.held = []
        source.push(seq=1, incarnation="B", stored=[key(5)])  # of the new one, on the old one's stream
        await eventually(lambda: worker.incarnation == "B" and worker.events_state == "live")
        assert len(index) == 0
        opened = source.opened
        source.push(seq=1, incarnation="A", stored=[key(6)])
        await eventually(lambda: source.opened > opened and worker.events_state == "live")
        source.push(seq=1, incarnation="B", stored=[key(7)])
        await eventually(lambda: index.match([key(7)]) != {})
        assert index.match([key(6)]) == {} == index.match([key(5)])


async def test_a_worker_without_events_is_reported() -> None:
    async with event_cluster() as (router, ctx, source):
        del ctx.scripts["/kv_events/stream"]
        source.end()
        await eventually(lambda: "404" in worker_of(router, ctx).events_state)
        degraded = (await router.client.get("/cluster_info")).json()["degraded"]
        assert any("no KV events" in reason for reason in degraded)
        assert any("no tokenizer" in reason or "model: missing" in reason for reason in degraded)
        assert (await router.post(PATH, prompt="x")).status_code == 200


async def test_probes_use_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    ctx, gen = FakeWorker("context"), FakeWorker("generation")
    async with fake_workers(ctx, gen), running_router(static_config([ctx], [gen])) as router:
        assert isinstance(await router.client.get("/health"), httpx.Response)
