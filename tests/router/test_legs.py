"""What each leg carries, and what the client gets back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_worker import (
    TOKENS,
    Call,
    context_body,
    finish_in_prefill,
)
from router_rig import CHAT, COMPLETIONS, cluster
from running_router import events_of

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
