"""Generation-only requests: the handle is checked, first tokens come once, usage is the aggregated server's, and the
context worker is told when its pages were read.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import msgspec
import pytest
from fake_engine import EOS, FINGERPRINT, Answers, FakeEngine, script
from http_worker import TOKENIZER, check_grammar, client_of, completion, make_app, served, sse, until

from generation_worker.acknowledge import Acknowledger
from kvstore.handoff import Handle

ID = 1 << 41


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


async def hand_over(answers: Answers, body: dict[str, Any], **engine_options: Any) -> tuple[httpx.Response, FakeEngine]:
    """Both legs, as a router makes them. The generation engine is returned with the answer."""
    context, generation = FakeEngine(answers), FakeEngine(answers, **engine_options)
    context.cached_tokens = 1
    generation.cached_tokens = 99  # what the generation worker had is not what the client is told
    first = {"disaggregated_params": {"request_type": "context_only", "disagg_request_id": ID}, "stream": False}
    async with client_of(make_app(context, "context")) as client:
        options = {key: value for key, value in body.items() if key != "stream_options"}
        answer = (await client.post("/v1/completions", json=options | first)).json()
    params = next(c for c in answer["choices"] if c["finish_reason"] == "not_finished")["disaggregated_params"]
    params |= {"request_type": "generation_only", "ctx_usage": answer["usage"]}
    async with client_of(make_app(generation, "generation")) as client:
        second = {"prompt": answer["prompt_token_ids"], "disaggregated_params": params}
        response = await client.post("/v1/completions", json=body | second)
    return response, generation


async def aggregated(answers: Answers, body: dict[str, Any]) -> httpx.Response:
    engine = FakeEngine(answers)
    engine.cached_tokens = 1
    async with client_of(make_app(engine)) as client:
        return await client.post("/v1/completions", json=body)


def comparable(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    document = response.json()
    return document["choices"], document["usage"]


@pytest.mark.parametrize("group", [1, 2, 5])
async def test_equal_to_one_server(group: int) -> None:
    """C066, C076 over 30 scripts: text, finish reasons, log-probabilities and usage."""
    for seed in range(30):
        rng = random.Random(seed)
        n = rng.randint(1, 3)
        made = [[*ids(" ".join(rng.choices(["A", "B", "END", "\U0001f642"], k=5))), EOS] for _ in range(n)]

        def answers(request: Any, index: int, made: list[list[int]] = made) -> list[int]:
            return made[index]

        body = completion("Hello", n=n, stop=["END"], logprobs=1, max_tokens=rng.randint(2, 20))
        reference = await aggregated(answers, body)
        if all(len(choice["token_ids"]) == 1 for choice in reference.json()["choices"]):
            continue
        whole, engine = await hand_over(answers, body, group=group)
        assert comparable(whole) == comparable(reference)
        assert engine.submitted[0].handle is not None
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed, _ = await hand_over(answers, body | options, group=group)
        events = sse(streamed.text)
        for ours, theirs in zip(check_grammar(events, chat=False, n=n), reference.json()["choices"], strict=True):
            assert (ours["text"], ours["finish_reason"]) == (theirs["text"], theirs["finish_reason"])
            assert ours["logprobs"] == theirs["logprobs"]["tokens"]
        assert events[-2]["usage"] == reference.json()["usage"]


async def test_engine_gets_handle_salt_and_prompt() -> None:
    _, engine = await hand_over(script(ids("A B C")), completion("Hello world", cache_salt="s", seed=5))
    submit = engine.submitted[0]
    assert submit.handle is not None
    assert (submit.handle.handoff_id, submit.cache_salt, submit.handoff_id) == (ID, "s", None)
    assert submit.prompt_ids == ids("Hello world")
    assert submit.handle.starts[0].seed == 5


async def test_timing_names_the_fetch_path() -> None:
    context = FakeEngine(script(ids("A B")))
    engine = FakeEngine(script(ids("A B")))
    async with client_of(make_app(context, "context")) as client:
        params = {"request_type": "context_only", "disagg_request_id": ID}
        answer = (await client.post("/v1/completions", json=completion("x", disaggregated_params=params))).json()
    params = answer["choices"][0]["disaggregated_params"] | {"request_type": "GENERATION_ONLY"}
    async with client_of(make_app(engine, "generation")) as client:
        body = completion("x", disaggregated_params=params)
        response = await client.post("/v1/completions", json=body, headers={"x-trtllm-return-metrics": "1"})
    assert "handoff;desc=shm;dur=3.000" in response.headers["server-timing"]


# ---------------------------------------------------------------------- handles that do not fit


def handle(**changes: Any) -> Handle:
    from kvstore.handoff import StartState

    good = Handle(1, ID, "i", FINGERPRINT.digest(), "127.0.0.1:1", 1, [1], [1], [StartState(0, 5, 1)])
    return msgspec.structs.replace(good, **changes)


GARBAGE = ["", "x", "AAAA", "!!!!", "/////w==", "gA==", "🙂", "A" * 1000]


@pytest.mark.parametrize("state", GARBAGE)
async def test_garbage_is_a_bad_request(state: str) -> None:
    engine = FakeEngine(script(ids("x")))
    params = {"request_type": "generation_only", "encoded_opaque_state": state}
    async with client_of(make_app(engine, "generation")) as client:
        response = await client.post("/v1/completions", json=completion([5], disaggregated_params=params))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "disaggregated_params.encoded_opaque_state"
    assert not engine.submitted


@pytest.mark.parametrize(
    ("changes", "fields", "status", "param"),
    [
        ({"fingerprint": "f" * 32}, {}, 409, "disaggregated_params.encoded_opaque_state"),
        ({"prompt_tokens": 2}, {}, 400, "disaggregated_params.encoded_opaque_state"),
        ({}, {"n": 2}, 400, "n"),
        ({"version": 2}, {}, 400, "disaggregated_params.encoded_opaque_state"),
    ],
)
async def test_handles_that_do_not_fit(
    changes: dict[str, Any], fields: dict[str, Any], status: int, param: str
) -> None:
    engine = FakeEngine(script(ids("x")))
    params = {"request_type": "generation_only", "encoded_opaque_state": handle(**changes).encode()}
    async with client_of(make_app(engine, "generation")) as client:
        response = await client.post("/v1/completions", json=completion([5], disaggregated_params=params, **fields))
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
    assert not engine.submitted


async def test_bad_usage_is_named() -> None:
    engine = FakeEngine(script(ids("x")))
    async with client_of(make_app(engine, "generation")) as client:
        params = {"encoded_opaque_state": handle().encode(), "ctx_usage": {"prompt_tokens": "x"}}
        params |= {"request_type": "generation_only"}
        response = await client.post("/v1/completions", json=completion([5], disaggregated_params=params))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "disaggregated_params.ctx_usage"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ctx_info_endpoint": "h:1"}, "ctx_request_id"),
        ({"ctx_request_id": ID}, "ctx_info_endpoint"),
        ({"ctx_request_id": ID, "ctx_info_endpoint": "h"}, "ctx_info_endpoint"),
    ],
)
async def test_what_generation_first_needs(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine(script(ids("x")))
    params = {"request_type": "generation_only", "schedule_style": 1} | fields
    async with client_of(make_app(engine, "generation")) as client:
        response = await client.post("/v1/completions", json=completion([5], disaggregated_params=params))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == f"disaggregated_params.{param}"


async def test_generation_first_awaits_the_hand_off() -> None:
    engine = FakeEngine(script([*ids("Hi"), EOS]))
    params = {"request_type": "generation_only", "schedule_style": 1, "ctx_request_id": ID, "ctx_info_endpoint": "h:1"}
    async with client_of(make_app(engine, "generation")) as client:
        response = await client.post("/v1/completions", json=completion([5], disaggregated_params=params))
    assert response.status_code == 200
    assert (engine.submitted[0].awaits, engine.submitted[0].source) == (ID, "h:1")


async def test_without_a_handle_it_is_computed_here() -> None:
    engine = FakeEngine(script([*ids("Hi"), EOS]))
    params = {"request_type": "generation_only", "first_gen_tokens": [5], "disagg_request_id": ID}
    async with client_of(make_app(engine, "generation")) as client:
        response = await client.post("/v1/completions", json=completion([5], disaggregated_params=params))
    assert response.json()["choices"][0]["text"] == "Hi"
    assert engine.submitted[0].handle is None


async def test_context_only_and_whole_requests_work_here() -> None:
    engine = FakeEngine(script([*ids("Hi"), EOS]))
    async with client_of(make_app(engine, "generation")) as client:
        for params in (None, {"request_type": "context_and_generation"}):
            body = completion("x", disaggregated_params=params)
            assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"] == "Hi"


# ---------------------------------------------------------------------- acknowledgements


async def test_pages_that_were_read_are_acknowledged() -> None:
    context, generation = FakeEngine(script(ids("x"))), FakeEngine(script(ids("x")))
    acks = httpx.ASGITransport(make_app(context, "context"))
    app = make_app(generation, "generation", acks=acks)
    async with client_of(app) as client:
        generation.fetched(handle(incarnation="i-7"))
        generation.fetched(handle(handoff_id=ID + 1), ok=False)
        await until(lambda: len(context.released) == 2)
        text = (await client.get("/prometheus/metrics")).text
    assert sorted(context.released) == [(ID, "i-7"), (ID + 1, "i")]
    assert "trtllm_disagg_handoffs_fetched_total 1.0" in text
    assert generation.on_handoff_fetched is None


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "no host:x", ""])
async def test_a_lost_acknowledgement_is_only_logged(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(script(ids("x")))
    async with Acknowledger() as acknowledger:
        engine.on_handoff_fetched = acknowledger.send
        engine.fetched(handle(endpoint=endpoint))
    assert "its lease ends it" in caplog.text
    engine.fetched(handle())
    assert "is closing" in caplog.text


async def test_disconnect_before_the_first_token_aborts() -> None:
    engine = FakeEngine(script(ids("a b c")))
    engine.gate = asyncio.Event()
    params = {"request_type": "generation_only", "encoded_opaque_state": handle().encode()}
    body = json.dumps(completion([5], disaggregated_params=params, stream=True)).encode()
    async with served(make_app(engine, "generation")) as (host, port):
        _, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: engine.submitted)
        writer.close()
        await until(lambda: engine.aborted, limit=1)
        await writer.wait_closed()
