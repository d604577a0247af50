"""generation_first: both legs at once, the generation worker's answer is the client's, one failure ends both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from fake_worker import TOKENS, Call, FakeWorker, answer_context, answer_generation, die_after, fail_with
from router_rig import COMPLETIONS, cluster
from running_router import RunningRouter, events_of, eventually

from kvstore.handoff_auth import AUTH_HEADER, handoff_signature

Rig = tuple[RunningRouter, list[FakeWorker], list[FakeWorker]]


def told(endpoint: str | None) -> dict[str, Any]:
    return {"disaggregated_params": {"ctx_dp_rank": None, "ctx_info_endpoint": [endpoint] if endpoint else None}}


def rig(workers: int = 1, endpoint: str | None = "10.0.0.1:77", **keys: Any) -> AbstractAsyncContextManager[Rig]:
    return cluster(workers, workers, {"schedule_style": "generation_first", **keys}, context_info=told(endpoint))


@pytest.fixture
async def pair() -> AsyncIterator[Rig]:
    async with rig() as each:
        yield each


@pytest.fixture
async def two_contexts() -> AsyncIterator[Rig]:
    async with rig(2) as each:
        yield each


def idle(router: RunningRouter) -> bool:
    return router.in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_both_legs_are_on_the_wire_at_once(pair: Rig, stream: bool) -> None:
    router, [ctx], [gen] = pair
    both = asyncio.Barrier(2)

    async def context(call: Call) -> None:
        await both.wait()
        await answer_context(call)

    async def generation(call: Call) -> None:
        await both.wait()
        await answer_generation(call)

    ctx.scripts[COMPLETIONS], gen.scripts[COMPLETIONS] = context, generation
    answer = await asyncio.wait_for(router.post(COMPLETIONS, prompt="hi", max_tokens=4, stream=stream), 5)
    assert answer.status_code == 200
    if stream:
        *chunks, done = events_of(answer.text)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == list(TOKENS) and done == "[DONE]"
    [prefill], [decode] = ctx.legs(), gen.legs()
    handoff_id = prefill.json["disaggregated_params"]["disagg_request_id"]
    assert prefill.json["disaggregated_params"] == {
        "request_type": "context_only",
        "disagg_request_id": handoff_id,
        "schedule_style": 1,
    }
    assert decode.json["disaggregated_params"] == {
        "request_type": "generation_only",
        "ctx_request_id": handoff_id,
        "disagg_request_id": handoff_id,
        "schedule_style": 1,
        "ctx_info_endpoint": "10.0.0.1:77",
    }
    assert prefill.json["stream"] is False if stream else "stream" not in prefill.json
    assert decode.json["max_tokens"] == prefill.json["max_tokens"] == 4
    assert decode.json["prompt"] == "hi" and not ctx.released
    await eventually(lambda: idle(router))


@pytest.mark.parametrize("broken", ["context", "generation"])
async def test_the_failure_of_one_leg_ends_the_other(pair: Rig, broken: str) -> None:
    router, [ctx], [gen] = pair
    never = asyncio.Event()

    async def hang(call: Call) -> None:
        await never.wait()

    for worker in (ctx, gen):
        worker.scripts[COMPLETIONS] = fail_with(500) if worker.role == broken else hang
    answer = await asyncio.wait_for(router.post(COMPLETIONS, prompt="hi", stream=True), 5)
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "scripted 500"
    other = gen if broken == "context" else ctx
    await eventually(lambda: len(other.lost) == 1)
    await eventually(lambda: len(ctx.released) == 1 and idle(router))


async def test_a_refusal_by_either_leg_is_the_clients(pair: Rig) -> None:
    router, [ctx], _ = pair
    body = {"error": {"message": "too long", "type": "t", "param": "prompt", "code": "context_length_exceeded"}}
    ctx.scripts[COMPLETIONS] = fail_with(400, body)
    answer = await router.post(COMPLETIONS, prompt="hi")
    assert answer.status_code == 400 and answer.json() == body
    await eventually(lambda: idle(router))


async def test_a_failed_attempt_is_made_again_with_others_and_a_fresh_id(two_contexts: Rig) -> None:
    router, ctx, _ = two_contexts
    ctx[0].scripts[COMPLETIONS] = fail_with(500)
    for _ in range(2):
        assert (await router.post(COMPLETIONS, prompt="hi")).status_code == 200
    ids = [call.json["disaggregated_params"]["disagg_request_id"] for worker in ctx for call in worker.legs()]
    assert len(ids) == len(set(ids)) >= 3  # the broken one came first at least once
    await eventually(lambda: idle(router))


async def test_a_stream_that_breaks_ends_with_an_error_event(pair: Rig) -> None:
    router, [ctx], [gen] = pair
    gen.scripts[COMPLETIONS] = die_after(2)
    answer = await router.post(COMPLETIONS, prompt="hi", stream=True)
    assert events_of(answer.text)[-1]["error"]["code"] == "upstream_failed"
    await eventually(lambda: len(ctx.released) == 1 and idle(router))


async def test_a_lost_client_ends_both_legs(pair: Rig) -> None:
    router, [ctx], [gen] = pair

    async def hang(call: Call) -> None:
        await asyncio.Event().wait()

    ctx.scripts[COMPLETIONS] = gen.scripts[COMPLETIONS] = hang
    request = asyncio.create_task(router.post(COMPLETIONS, prompt="hi"))
    await eventually(lambda: bool(ctx.legs()) and bool(gen.legs()))
    request.cancel()
    await eventually(lambda: len(ctx.lost) == 1 and len(gen.lost) == 1)
    await eventually(lambda: len(ctx.released) == 1 and idle(router))
    await asyncio.gather(request, return_exceptions=True)


async def test_a_context_worker_that_cannot_be_followed_is_a_bad_gateway() -> None:
    async with rig(endpoint=None) as (router, [ctx], [gen]):
        answer = await router.post(COMPLETIONS, prompt="hi")
        assert answer.status_code == 502 and "generation_first" in answer.json()["error"]["message"]
        assert not ctx.legs() and not gen.legs() and router.in_flight == 0


async def test_the_endpoint_is_signed() -> None:
    async with rig(internal_request_auth_key="secret") as (router, _, [gen]):
        assert (await router.post(COMPLETIONS, prompt="hi")).status_code == 200
        [decode] = gen.legs()
        assert decode.headers[AUTH_HEADER] == handoff_signature("secret", "10.0.0.1:77", None)
