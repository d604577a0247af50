"""The router between scripted workers, over real sockets: what clients and workers get to see."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_worker import (
    TOKENS,
    Call,
    FakeWorker,
    answer_context,
    answer_generation,
    chunk_of,
    context_body,
    cut_at_once,
    die_after,
    fail_with,
    fake_workers,
    finish_in_prefill,
    hang_until,
)
from running_router import RunningRouter, eventually, events_of, running_router, static_config

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@contextlib.asynccontextmanager
async def cluster(
    contexts: int = 1, generations: int = 1, config: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[RunningRouter, list[FakeWorker], list[FakeWorker]]]:
    ctx = [FakeWorker("context") for _ in range(contexts)]
    gen = [FakeWorker("generation") for _ in range(generations)]
    async with (
        fake_workers(*ctx, *gen),
        running_router(static_config(ctx, gen, **(config or {})), **options) as running,
    ):
        await eventually(lambda: sum(worker.usable for worker in running.router.cluster.workers) == len(ctx + gen))
        yield running, ctx, gen


# ---------------------------------------------------------------- the two legs


@pytest.mark.parametrize("stream", [False, True])
async def test_both_legs_of_a_completion(stream: bool) -> None:
    async with cluster() as (router, [ctx], [gen]):
        answer = await router.post(COMPLETIONS, prompt="hi", max_tokens=4, temperature=0, stream=stream, seed=3)
        assert answer.status_code == 200
        if stream:
            events = events_of(answer.text)
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "".join(TOKENS)
            assert events[-1] == "[DONE]"
        else:
            assert answer.json()["choices"][0]["text"] == "".join(TOKENS)

    [context], [generation] = ctx.legs(), gen.legs()
    params = context.json["disaggregated_params"]
    assert params.keys() == {"request_type", "disagg_request_id", "schedule_style"}
    assert params["request_type"] == "context_only" and params["schedule_style"] == 0
    assert 2**40 <= params["disagg_request_id"] < 2**63
    kept = {"model": "fake", "max_tokens": 4, "temperature": 0, "seed": 3}
    assert context.json.items() >= (kept | {"prompt": "hi"}).items()
    assert context.json.get("stream", False) is False
    assert generation.json.items() >= (kept | {"prompt": [1, 2, 3], "stream": stream}).items()
    handed = generation.json["disaggregated_params"]
    assert handed["request_type"] == "generation_only"
    assert handed["disagg_request_id"] == handed["ctx_request_id"] == params["disagg_request_id"]
    assert handed["encoded_opaque_state"] == "c3RhdGU=" and handed["first_gen_tokens"] == [65]
    assert handed["ctx_usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert answer.headers["x-trtllm-context-worker"] == ctx.address
    assert answer.headers["x-trtllm-generation-worker"] == gen.address
    assert not ctx.released


async def test_chat_keeps_messages_and_adds_ids() -> None:
    messages = [{"role": "user", "content": "hi é \U0001f600"}]
    async with cluster() as (router, [ctx], [gen]):
        options = {"include_usage": True}
        await router.post(CHAT, messages=messages, stream=True, stream_options=options, max_completion_tokens=9)
    [context], [generation] = ctx.legs(), gen.legs()
    assert context.path == generation.path == CHAT
    assert context.json["messages"] == generation.json["messages"] == messages
    assert "stream_options" not in context.json and generation.json["stream_options"] == options
    assert generation.json["prompt_token_ids"] == [1, 2, 3] and "prompt_token_ids" not in context.json


async def test_unknown_handoff_fields_are_forwarded_untouched() -> None:
    async def script(call: Call) -> None:
        await call.answer(200, context_body(call, extra_field={"deep": [1, 2.50, "x"]}, draft_tokens=None))

    async with cluster() as (router, [ctx], [gen]):
        ctx.scripts[COMPLETIONS] = script
        await router.post(COMPLETIONS, prompt="hi", max_tokens=4)
    params = gen.legs()[0].json["disaggregated_params"]
    assert params["extra_field"] == {"deep": [1, 2.5, "x"]} and params["draft_tokens"] is None


async def test_client_handoff_parameters_are_stripped() -> None:
    evil = {"request_type": "generation_only", "encoded_opaque_state": "evil", "ctx_info_endpoint": "tcp://evil"}
    async with cluster() as (router, [ctx], [gen]):
        await router.post(COMPLETIONS, prompt="hi", max_tokens=4, disaggregated_params=evil)
    assert b"evil" not in ctx.legs()[0].raw + gen.legs()[0].raw


async def test_one_encoded_state_for_all_choices() -> None:
    """n = 2, the first choice over: the generation leg gets the handle, which the other choice carries."""

    async def script(call: Call) -> None:
        body = context_body(call)
        over = json.loads(json.dumps(body["choices"][0]))
        over["finish_reason"] = "stop"
        del over["disaggregated_params"]["encoded_opaque_state"]
        body["choices"] = [over, {**body["choices"][0], "index": 1}]
        await call.answer(200, body)

    async with cluster() as (router, [ctx], [gen]):
        ctx.scripts[COMPLETIONS] = script
        await router.post(COMPLETIONS, prompt="hi", max_tokens=4, n=2)
    assert gen.legs()[0].json["disaggregated_params"]["encoded_opaque_state"] == "c3RhdGU="


async def test_a_foreign_worker_ends_prefill_with_length() -> None:
    """Upstream says "length" whatever the limit was: with KV on offer and more to come, decoding goes on."""

    async def script(call: Call) -> None:
        await call.answer(200, context_body(call, "length", encoded_opaque_state="c3RhdGU="))

    async with cluster() as (router, [ctx], [gen]):
        ctx.scripts[COMPLETIONS] = script
        answer = await router.post(COMPLETIONS, prompt="hi", max_tokens=4)
        assert answer.json()["choices"][0]["text"] == "ABCD"
        one = await router.post(COMPLETIONS, prompt="hi", max_tokens=1)
        assert one.json()["choices"][0]["text"] == "A"
        assert len(gen.legs()) == 1


@pytest.mark.parametrize("drop", ["ctx_request_id", "disagg_request_id"])
async def test_an_answer_that_cannot_be_handed_over_is_a_bad_gateway(drop: str) -> None:
    async def script(call: Call) -> None:
        await call.answer(200, context_body(call, **{drop: None}))

    async with cluster() as (router, [ctx], [gen]):
        ctx.scripts[COMPLETIONS] = script
        answer = await router.post(COMPLETIONS, prompt="hi", max_tokens=4)
        assert answer.status_code == 502 and drop in answer.json()["error"]["message"]
        assert not gen.legs() and router.in_flight == 0


# ---------------------------------------------------------------- finished during prefill (C067)


async def test_finished_in_prefill_is_answered_without_a_generation_leg() -> None:
    async with cluster() as (router, [ctx], [gen]):
        ctx.scripts[COMPLETIONS] = finish_in_prefill
        answer = await router.post(COMPLETIONS, prompt="hi", max_tokens=1)
        body = answer.json()
        assert body["choices"][0]["text"] == "A" and body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 1
        assert "prompt_token_ids" not in body and "disaggregated_params" not in body["choices"][0]
        assert not gen.legs()
        assert router.router.metrics.finished_in_prefill == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("usage", [False, True])
async def test_finished_in_prefill_streams_proper_chunks(path: str, usage: bool) -> None:
    async with cluster() as (router, [ctx], [gen]):
        ctx.scripts[path] = finish_in_prefill
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "hi"}
        if usage:
            body["stream_options"] = {"include_usage": True}
        answer = await router.post(path, max_tokens=1, stream=True, **body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, done = events_of(answer.text)
        assert done == "[DONE]" and not gen.legs()
    if usage:
        last = events.pop()
        assert last["choices"] == [] and last["usage"]["total_tokens"] == 4
    assert all(event.get("usage") is None for event in events)
    choices = [event["choices"][0] for event in events]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices)
    assert text == "A"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert choices[-1]["finish_reason"] == "length"
    assert len({(event["id"], event["object"], event["created"], event["model"]) for event in events}) == 1
    if path == CHAT:
        assert choices[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in choices[1:])


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


# ---------------------------------------------------------------- disconnects (C085)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["context", "generation", "first token"])
async def test_losing_the_client_ends_both_legs(stage: str, stream: bool) -> None:
    if stage == "first token" and not stream:
        pytest.skip("a plain answer has no first token")
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


# ---------------------------------------------------------------- timings


async def test_server_timing_of_both_legs() -> None:
    async def context(call: Call) -> None:
        assert call.headers["x-trtllm-return-metrics"] == "1"
        await call.answer(200, context_body(call), "server-timing: queue;dur=1.5, prefill;dur=20")

    async def generation(call: Call) -> None:
        assert call.headers["x-trtllm-return-metrics"] == "1"
        await call.start_stream("server-timing: handoff;desc=shm;dur=2, gen_queue;dur=1")
        await call.end_stream()

    async with cluster() as (router, [ctx], [gen]):
        ctx.scripts[COMPLETIONS], gen.scripts[COMPLETIONS] = context, generation
        request = {"prompt": "hi", "stream": True}
        answer = await router.client.post(COMPLETIONS, json=request, headers={"X-TRTLLM-return-metrics": "1"})
        names = [entry.strip().split(";")[0] for entry in answer.headers["server-timing"].split(",")]
        assert names == ["ctx_queue", "ctx_prefill", "gen_handoff", "gen_queue", "disagg_queue", "disagg_ttft"]
        assert "gen_handoff;desc=shm;dur=2" in answer.headers["server-timing"]
        ctx.scripts.clear()
        gen.scripts.clear()
        assert "server-timing" not in (await router.post(COMPLETIONS, prompt="hi")).headers


async def test_request_ids_are_kept_or_made() -> None:
    async with cluster() as (router, [ctx], _):
        given = await router.client.post(COMPLETIONS, json={"prompt": "x"}, headers={"x-request-id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1" == ctx.legs()[0].headers["x-request-id"]
        made = [(await router.post(COMPLETIONS, prompt="x")).headers["x-request-id"] for _ in range(2)]
        assert len(set(made)) == 2
