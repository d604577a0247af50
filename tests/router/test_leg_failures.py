"""Failures of a leg: before the first byte a status or another try, after it one error event."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_worker import (
    Call,
    answer_context,
    answer_generation,
    chunk_of,
    cut_at_once,
    die_after,
    fail_with,
    hang_until,
)
from router_rig import CHAT, COMPLETIONS, cluster
from running_router import events_of, eventually

# ---------------------------------------------------------------- errors before the first byte


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body",
    [b"", b"  ", b"not json", b'{"model": "m", "prompt": "hi"', b"[1]", b'"text"', b"7", b'{"a": 1} x', b"\xff\xfe{}"],
)
async def test_malformed_bodies_are_400_with_the_openai_object(path: str, body: bytes) -> None:
    async with cluster() as (router, [ctx], _):
        answer = await router.client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert not ctx.calls


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": "all"}, "stream_options"),
        ({"stream": True, "best_of": 3}, "best_of"),
        ({"stream": True, "best_of": 3, "n": 2}, "best_of"),
        ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options"),
    ],
)
async def test_fields_that_the_router_takes_out_are_validated_by_it(fields: dict[str, Any], param: str) -> None:
    async with cluster() as (router, [ctx], _):
        answer = await router.post(COMPLETIONS, prompt="hi", **fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
        assert not ctx.calls


async def test_request_chat_templates_need_permission() -> None:
    async with cluster() as (router, [ctx], _):
        answer = await router.post(CHAT, messages=[], chat_template="{{ 1 }}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template"
        await router.post(CHAT, messages=[], chat_template=None)
    async with cluster(config={"allow_request_chat_template": True}) as (router, [ctx], _):
        await router.post(CHAT, messages=[], chat_template="{{ 1 }}")
        assert ctx.legs()[0].json["chat_template"] == "{{ 1 }}"


@pytest.mark.parametrize("leg", ["context", "generation"])
@pytest.mark.parametrize("status", [400, 404, 409, 429])
async def test_a_worker_4xx_passes_unchanged_and_is_not_retried(leg: str, status: int) -> None:
    async with cluster(2, 2) as (router, ctx, gen):
        body = {"error": {"message": "messages: wrong", "type": "t", "param": "messages", "code": "c"}}
        for worker in ctx if leg == "context" else gen:
            worker.scripts[CHAT] = fail_with(status, body, "retry-after: 7")
        answer = await router.post(CHAT, messages=[], stream=True)
        assert answer.status_code == status and answer.json() == body
        assert answer.headers["retry-after"] == "7"
        assert sum(len(worker.legs()) for worker in ctx) == 1
        assert sum(len(worker.legs()) for worker in gen) == (leg == "generation")
        if leg == "generation":
            await eventually(lambda: sum(len(worker.released) for worker in ctx) == 1)
        assert router.in_flight == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}, "too long"),
        (b"<html>", "context worker rejected the request with status 400"),
    ],
)
async def test_foreign_error_bodies_become_the_openai_object(body: Any, message: str) -> None:
    async with cluster() as (router, [ctx], _):
        ctx.scripts[COMPLETIONS] = fail_with(400, body)
        answer = await router.post(COMPLETIONS, prompt="hi")
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == message and answer.json()["error"]["param"] is None


@pytest.mark.parametrize("leg", ["context", "generation"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["500", "cut"])
async def test_a_failed_leg_is_retried_elsewhere_with_a_fresh_id(leg: str, stream: bool, fault: str) -> None:
    async with cluster(2, 2) as (router, ctx, gen):
        broken = (ctx if leg == "context" else gen)[0]
        broken.scripts[COMPLETIONS] = fail_with(500) if fault == "500" else cut_at_once
        for _ in range(3):  # round robin comes to the broken worker within two
            answer = await router.post(COMPLETIONS, prompt="hi", stream=stream)
            assert answer.status_code == 200 and ("[DONE]" in answer.text) == stream
        assert broken.legs()
        legs = [call for worker in ctx for call in worker.legs()]
        ids = [call.json["disaggregated_params"]["disagg_request_id"] for call in legs]
        assert len(set(ids)) > 3  # a kept connection that closes without an answer is tried anew with the same id
        owed = {call.json["disaggregated_params"]["disagg_request_id"] for call in broken.legs()}
        await eventually(lambda: {handoff for worker in ctx for handoff in worker.released} == owed)
        assert router.in_flight == 0


@pytest.mark.parametrize("status", [204, 302, 999])
async def test_statuses_that_are_no_answer_are_a_bad_gateway(status: int) -> None:
    async with cluster() as (router, [ctx], _):
        ctx.scripts[COMPLETIONS] = fail_with(status, b"")
        answer = await router.post(COMPLETIONS, prompt="hi")
        assert answer.status_code == 502 and str(status) in answer.json()["error"]["message"]


async def test_a_generation_worker_that_vanishes_between_the_legs() -> None:
    async with cluster() as (router, [ctx], [gen]):

        async def script(call: Call) -> None:
            worker = next(worker for worker in router.router.cluster.workers if worker.port == gen.port)
            router.router.cluster.suspect(worker, "scripted", unreachable=True)
            await answer_context(call)

        ctx.scripts[COMPLETIONS] = script
        answer = await router.post(COMPLETIONS, prompt="hi")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_ready"
        await eventually(lambda: len(ctx.released) == 1)
        assert router.in_flight == 0


async def test_the_only_worker_is_not_asked_twice() -> None:
    async with cluster() as (router, [ctx], [gen]):
        ctx.scripts[COMPLETIONS] = fail_with(500)
        answer = await router.post(COMPLETIONS, prompt="hi", stream=True)
        assert answer.status_code == 500 and answer.json()["error"]["message"] == "scripted 500"
        assert len(ctx.legs()) == 1 and not gen.legs()


async def test_retries_end() -> None:
    async with cluster(3, 1, config={"max_retries": 1}) as (router, ctx, _):
        for worker in ctx:
            worker.scripts[COMPLETIONS] = fail_with(503, None, "retry-after: 3")
        answer = await router.post(COMPLETIONS, prompt="hi")
        assert answer.status_code == 503 and answer.headers["retry-after"] == "3"
        assert sum(len(worker.legs()) for worker in ctx) == 2


async def test_an_unreachable_worker_is_down_until_it_answers_a_probe() -> None:
    async with cluster(2, 1) as (router, ctx, _):
        gone, port = ctx[0], ctx[0].port
        await gone.stop()
        for _ in range(4):
            assert (await router.post(COMPLETIONS, prompt="hi")).status_code == 200
        state = {worker.port: worker.state for worker in router.router.cluster.workers}
        assert state[port] == "down"
        await gone.start(port)
        await eventually(lambda: all(worker.usable for worker in router.router.cluster.workers))
        for _ in range(2):
            await router.post(COMPLETIONS, prompt="hi")
        assert gone.legs()


async def test_no_worker_is_503_with_retry_after() -> None:
    async with cluster() as (router, [ctx], _):
        await ctx.stop()
        first = await router.post(COMPLETIONS, prompt="hi")
        assert first.status_code == 502
        second = await router.post(COMPLETIONS, prompt="hi")
        assert second.status_code == 503 and int(second.headers["retry-after"]) >= 1
        assert second.json()["error"]["code"] == "not_ready"
        health = await router.client.get("/health")
        assert health.status_code == 503 and "context" in health.json()["error"]["message"]
        await ctx.start()


async def test_the_deadline_is_504_before_the_first_byte() -> None:
    async with cluster(request_timeout=0.3) as (router, [ctx], [gen]):
        never = asyncio.Event()
        gen.scripts[COMPLETIONS] = hang_until(never, answer_generation)
        answer = await router.post(COMPLETIONS, prompt="hi", stream=True)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        await eventually(lambda: len(gen.lost) == 1 and len(ctx.released) == 1)
        assert router.in_flight == 0


# ---------------------------------------------------------------- errors after the first byte (C027)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_that_breaks_ends_with_one_error_event(path: str) -> None:
    async with cluster(2, 2) as (router, ctx, gen):
        for worker in gen:
            worker.scripts[path] = die_after(3)
        body: dict[str, Any] = {"messages": []} if path == CHAT else {"prompt": "hi"}
        answer = await asyncio.wait_for(router.post(path, stream=True, **body), 5)
        assert answer.status_code == 200
        *tokens, error = events_of(answer.text)
        assert len(tokens) == 3 and all(token["choices"][0]["finish_reason"] is None for token in tokens)
        assert error["error"]["type"] == "server_error" and error["error"]["code"] == "upstream_failed"
        assert "[DONE]" not in answer.text
        assert sum(len(worker.legs()) for worker in gen) == 1
        await eventually(lambda: sum(len(worker.released) for worker in ctx) == 1)
        assert router.in_flight == 0


async def test_half_a_chunk_is_never_forwarded() -> None:
    async def script(call: Call) -> None:
        await call.start_stream()
        await call.event(chunk_of(call, "A"))
        whole = b"data: " + json.dumps(chunk_of(call, "B")).encode() + b"\n\n"
        await call.send(b"%x\r\n%b" % (len(whole), whole[:40]))
        await asyncio.sleep(0.02)
        call.cut()

    async with cluster() as (router, _, [gen]):
        gen.scripts[COMPLETIONS] = script
        answer = await router.post(COMPLETIONS, prompt="hi", stream=True)
        first, error = events_of(answer.text)
        assert first["choices"][0]["text"] == "A" and "error" in error


async def test_an_event_cut_between_chunks_does_not_swallow_the_error() -> None:
    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(b'data: {"choices": [')
        await asyncio.sleep(0.02)
        call.cut()

    async with cluster() as (router, _, [gen]):
        gen.scripts[COMPLETIONS] = script
        answer = await router.post(COMPLETIONS, prompt="hi", stream=True)
        blocks = answer.text.strip().split("\n\n")
        assert len(blocks) == 2 and "error" in json.loads(blocks[1].removeprefix("data: "))


async def test_the_deadline_in_a_stream_is_an_error_event() -> None:
    async def script(call: Call) -> None:
        await call.start_stream()
        await call.event(chunk_of(call, "A"))
        await asyncio.Event().wait()

    async with cluster(request_timeout=0.3) as (router, _, [gen]):
        gen.scripts[COMPLETIONS] = script
        answer = await router.post(COMPLETIONS, prompt="hi", stream=True)
        _, error = events_of(answer.text)
        assert error["error"]["code"] == "timeout"


async def test_a_plain_answer_that_breaks_is_a_bad_gateway() -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        await asyncio.sleep(0.02)
        call.cut()

    async with cluster() as (router, [ctx], [gen]):
        gen.scripts[COMPLETIONS] = script
        answer = await router.post(COMPLETIONS, prompt="hi")
        assert answer.status_code == 502 and answer.json()["error"]["code"] == "upstream_failed"
        await eventually(lambda: len(ctx.released) == 1)
