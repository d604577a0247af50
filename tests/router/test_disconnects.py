"""Losing the client, at each stage, with the bookkeeping back at nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from fake_worker import (
    Call,
    answer_context,
    answer_generation,
    chunk_of,
    fail_with,
    hang_until,
)
from router_rig import COMPLETIONS, cluster
from running_router import eventually


@pytest.mark.parametrize(
    ("stage", "stream"),
    [("context", False), ("context", True), ("generation", False), ("generation", True), ("first token", True)],
)
async def test_losing_the_client_ends_both_legs(stage: str, stream: bool) -> None:
    never = asyncio.Event()

    async def stall(call: Call) -> None:
        await call.start_stream()
        await call.event(chunk_of(call, "A"))
        await never.wait()

    async with cluster() as (router, [ctx], [gen]):
        if stage == "context":
            ctx.scripts[COMPLETIONS] = hang_until(never, answer_context)
        elif stage == "generation":
            gen.scripts[COMPLETIONS] = hang_until(never, answer_generation)
        else:
            gen.scripts[COMPLETIONS] = stall
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        body = json.dumps({"prompt": "hi", "stream": stream}).encode()
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (COMPLETIONS.encode(), len(body)))
        writer.write(body)
        busy = ctx if stage == "context" else gen
        await eventually(lambda: len(busy.legs()) == 1)
        if stage == "first token":
            await reader.readuntil(b"data: ")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await eventually(lambda: len(busy.lost) == 1, timeout=2)
        await eventually(lambda: len(ctx.released) == 1, timeout=2)
        handoff = ctx.legs()[0].json["disaggregated_params"]["disagg_request_id"]
        assert ctx.released == [handoff]
        assert router.in_flight == 0 and router.router.metrics.client_disconnects == 1
        ctx.scripts.clear()
        gen.scripts.clear()
        assert (await router.post(COMPLETIONS, prompt="hi")).status_code == 200


async def test_pause_points_and_release_after_the_context_leg() -> None:
    async with cluster(fault_injection=True) as (router, [ctx], [gen]):
        set_to = await router.client.put("/debug/delays", json={"after_context": 30.0})
        assert set_to.json() == {"after_context": 30.0}
        request = asyncio.ensure_future(router.post(COMPLETIONS, prompt="hi"))
        await eventually(lambda: len(ctx.legs()) == 1)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await eventually(lambda: len(ctx.released) == 1)
        assert not gen.legs() and router.in_flight == 0
        assert (await router.client.put("/debug/delays", json={"nowhere": 1})).status_code == 400
        await router.client.put("/debug/delays", json={})


async def test_no_pause_points_without_fault_injection() -> None:
    async with cluster() as (router, _, _):
        assert (await router.client.put("/debug/delays", json={})).status_code == 404


async def test_a_worker_that_knows_no_release_is_not_asked_again() -> None:
    async with cluster() as (router, [ctx], [gen]):
        ctx.scripts["/handoff/release"] = fail_with(404)
        gen.scripts[COMPLETIONS] = fail_with(400)
        for _ in range(3):
            await router.post(COMPLETIONS, prompt="hi")
            await eventually(lambda: not router.router.cluster.workers[0].releases)
        assert sum(call.path == "/handoff/release" for call in ctx.calls) == 1
