"""Context-only requests, control routes, events and metrics of a context worker over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fake_engine import EOS, FINGERPRINT, FakeEngine, script
from http_worker import TOKENIZER, chat, client_of, completion, make_app, served, until

from context_worker.kv_events import EventStream
from engine.feeds import MAX_RECORDS
from engine.messages import Feed
from kvstore.errors import HandoffRefused
from kvstore.handoff import Handle
from kvstore.protocol import KvEvent
from openai_api.reply import Reply

ID = 1 << 41


def context_only(**fields: Any) -> dict[str, Any]:
    return {"request_type": "context_only", "disagg_request_id": ID} | fields


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


async def prefill(engine: FakeEngine, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    async with client_of(make_app(engine, "context")) as client:
        response = await client.post(path, json={"disaggregated_params": context_only()} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    document: dict[str, Any] = response.json()
    return document


@pytest.mark.parametrize("stream", [False, True])
async def test_first_token_and_handle(stream: bool) -> None:
    engine = FakeEngine(script(ids("Hello there")))
    engine.cached_tokens = 1
    answer = await prefill(engine, completion("Hello world", stream=stream))
    choice = answer["choices"][0]
    params = choice["disaggregated_params"]
    assert choice["finish_reason"] == "not_finished"
    assert params["request_type"] == "context_only"
    assert params["first_gen_tokens"] == ids("Hello there")[:1]
    assert params["ctx_request_id"] == params["disagg_request_id"] == ID
    assert params["schedule_style"] == 0
    handle = Handle.decode(params["encoded_opaque_state"])
    assert (handle.handoff_id, handle.prompt_tokens) == (ID, len(ids("Hello world")))
    assert answer["prompt_token_ids"] == ids("Hello world")
    assert answer["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1},
    } | {"prompt_tokens": len(ids("Hello world")), "total_tokens": len(ids("Hello world")) + 1}  # fmt: skip
    assert not engine.released


async def test_chat_answers_prompt_ids_too() -> None:
    engine = FakeEngine(script(ids("Hello there")))
    body = chat("Hi", disaggregated_params=context_only(return_prompt_token_ids_b64=True))
    answer = await prefill(engine, body, "/v1/chat/completions")
    assert "prompt_token_ids" not in answer
    assert answer["prompt_token_ids_b64"]
    assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(
    ("tokens", "fields", "finish_reason", "stop_reason", "text"),
    [
        ([EOS], {}, "stop", None, ""),
        (ids("A B"), {"max_tokens": 1}, "length", None, "A"),
        (ids("A B"), {"stop_token_ids": ids("A")}, "stop", ids("A")[0], ""),
        (ids("A B"), {"stop": "A"}, "stop", "A", ""),
    ],
    ids=["eos", "max_tokens", "stop id", "stop string"],
)
async def test_an_answer_that_the_first_token_ends(
    tokens: list[int], fields: dict[str, Any], finish_reason: str, stop_reason: Any, text: str
) -> None:
    """C067, C068: real finish reason, nothing handed over, nothing pinned."""
    engine = FakeEngine(script(tokens))
    choice = (await prefill(engine, completion("x", **fields)))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == (finish_reason, stop_reason, text)
    assert "encoded_opaque_state" not in choice["disaggregated_params"]
    offered = engine.submitted and "stop" in fields
    assert engine.released == ([(ID, None)] if offered else [])


async def test_choices_that_ended_are_marked_in_the_handle() -> None:
    firsts = [ids("A"), [EOS], ids("B")]
    engine = FakeEngine(lambda _, index: [*firsts[index], *ids(" on")])
    answer = await prefill(engine, completion("x", n=3, stop="B"))
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["not_finished", "stop", "stop"]
    states = {choice["disaggregated_params"]["encoded_opaque_state"] for choice in answer["choices"]}
    assert len(states) == 1
    starts = Handle.decode(states.pop()).starts
    assert [start.finish_reason for start in starts] == [None, "stop", "stop"]
    assert answer["usage"]["completion_tokens"] == 3
    assert not engine.released


async def test_local_ids_without_a_routers_id() -> None:
    engine = FakeEngine(script(ids("Hello there")))
    answer = await prefill(engine, completion("x", disaggregated_params={"request_type": "context_only"}))
    assert answer["choices"][0]["disaggregated_params"]["disagg_request_id"] < 1 << 40


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"request_type": "generation_only"}, "request_type"),
        (context_only(disagg_request_id=5), "disagg_request_id"),
        (context_only(disagg_request_id=2**63), "disagg_request_id"),
        (context_only(schedule_style=1, disagg_request_id=None), "disagg_request_id"),
    ],
)
async def test_refusals(params: dict[str, Any], param: str) -> None:
    engine = FakeEngine(script(ids("x")))
    async with client_of(make_app(engine, "context")) as client:
        response = await client.post("/v1/completions", json=completion("x", disaggregated_params=params))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"disaggregated_params.{param}"
    assert not engine.submitted


async def test_a_refused_id_does_not_release_its_owners_pages() -> None:
    engine = FakeEngine(script(ids("x y")))
    engine.failure = (0, HandoffRefused("the id is in use"))
    async with client_of(make_app(engine, "context")) as client:
        response = await client.post("/v1/completions", json=completion("x", disaggregated_params=context_only()))
    assert response.status_code == 409
    assert not engine.released


async def test_disconnect_during_prefill_releases() -> None:
    engine = FakeEngine(script(ids("x y")))
    engine.gate = asyncio.Event()
    async with served(make_app(engine, "context")) as (host, port):
        _, writer = await asyncio.open_connection(host, port)
        body = json.dumps(completion("x", disaggregated_params=context_only())).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: engine.submitted)
        writer.close()
        await until(lambda: engine.released, limit=1)
        await writer.wait_closed()
    assert engine.aborted
    assert engine.released == [(ID, None)]


async def test_whole_requests_are_served_too() -> None:
    engine = FakeEngine(script([*ids("Hi"), EOS]))
    async with client_of(make_app(engine, "context")) as client:
        response = await client.post("/v1/completions", json=completion("x"))
    assert response.json()["choices"][0]["text"] == "Hi"
    assert "disaggregated_params" not in response.json()["choices"][0]


# ---------------------------------------------------------------------- control


async def test_release() -> None:
    engine = FakeEngine(script([EOS]))
    async with client_of(make_app(engine, "context")) as client:
        for body in ({"disagg_request_id": ID}, {"disagg_request_id": ID, "incarnation": "i", "more": 1}):
            response = await client.post("/handoff/release", json=body)
            assert response.json() == {"released": True}
        for bad in (b"", b"[]", b'{"disagg_request_id": "x"}'):
            response = await client.post("/handoff/release", content=bad)
            assert response.status_code == 400
            assert "error" in response.json()
    assert engine.released == [(ID, None), (ID, "i")]


async def test_what_the_worker_is() -> None:
    engine = FakeEngine(script([EOS]))
    async with client_of(make_app(engine, "context", max_batch_size=7)) as client:
        info = (await client.get("/server_info")).json()
        assert (info["role"], info["model"], info["incarnation"]) == ("context", "tiny", "fake-1")
        assert (info["tokens_per_block"], info["max_batch_size"], info["transfers"]) == (32, 7, ["shm"])
        assert info["fingerprint"]["model"] == FINGERPRINT.model
        assert (await client.get("/version")).json()["version"]
        assert (await client.get("/v1/models")).json()["data"][0]["owned_by"]
        clock = (await client.get("/steady_clock_offset")).json()
        assert clock["receive_ts"] <= clock["transmit_ts"]
        assert (await client.post("/steady_clock_offset", json={"offset": -0.5})).status_code == 200


async def test_health_means_that_a_request_would_be_served() -> None:
    engine = FakeEngine(script([EOS]))
    app = make_app(engine, "context")
    async with client_of(app) as client:
        assert (await client.get("/health")).status_code == 200
        app.state.worker.draining = True
        response = await client.get("/health")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "not_ready"
        app.state.worker.draining, engine.alive = False, False
        assert (await client.get("/health")).status_code == 503


async def test_delays_only_with_fault_injection() -> None:
    engine = FakeEngine(script([EOS]))
    async with client_of(make_app(engine, "context")) as client:
        assert (await client.put("/debug/delays", json={"step": 1})).status_code == 404
    async with client_of(make_app(engine, "context", fault_injection=True)) as client:
        assert (await client.put("/debug/delays", json={"step": 1})).status_code == 200
        assert (await client.put("/debug/delays", json={"step": "x"})).status_code == 400
    assert engine.delays == {"step": 1.0}


# ---------------------------------------------------------------------- metrics


async def test_prometheus() -> None:
    engine = FakeEngine(script([*ids("Hi"), EOS]))
    engine.stats.blocks_used, engine.stats.blocks_pinned, engine.stats.fetch_blocks = 3, 2, 9
    engine.stats.fetch_failures = {"stale": 4}
    async with client_of(make_app(engine, "context")) as client:
        await client.post("/v1/completions", json=completion("x"))
        await client.post("/v1/completions", json=completion("x", n=0))
        engine.failure = (0, HandoffRefused("no"))
        await client.post("/v1/completions", json=completion("x"))
        text = (await client.get("/prometheus/metrics")).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = '{engine_type="trtllm-disagg",model_name="tiny"}'
    assert float(lines["trtllm_disagg_kv_blocks_used"]) == 3
    assert float(lines["trtllm_disagg_kv_blocks_pinned"]) == 2
    assert float(lines["trtllm_disagg_fetched_blocks_total"]) == 9
    assert float(lines["trtllm_disagg_requests_total"]) == 2
    assert float(lines['trtllm_disagg_handoff_failures_total{cause="stale"}']) == 4
    assert float(lines['trtllm_disagg_request_errors_total{code="handoff_refused"}']) == 1
    assert float(lines["trtllm_kv_cache_used_blocks" + labels]) == 5
    assert float(lines["trtllm_generation_tokens_total" + labels]) == len(ids("Hi")) + 1
    finished = '{engine_type="trtllm-disagg",finished_reason="stop",model_name="tiny"}'
    assert float(lines["trtllm_request_success_total" + finished]) == 1
    assert float(lines["trtllm_time_to_first_token_seconds_count" + labels]) == 1


async def test_lists_are_drained_by_one_read() -> None:
    engine = FakeEngine(script([EOS]))
    engine.feeds.take(Feed("iterations", [b'{"iter":4}', b'{"iter":5}']))
    engine.feeds.take(Feed("cache_events", [b'{"event_id":0}']))
    async with client_of(make_app(engine, "context")) as client:
        assert (await client.get("/metrics")).json() == [{"iter": 4}, {"iter": 5}]
        assert (await client.get("/metrics")).json() == []
        assert (await client.post("/kv_cache_events")).json() == [{"event_id": 0}]
        assert (await client.post("/kv_cache_events")).json() == []
        assert (await client.get("/perf_metrics")).json() == []


async def test_lists_that_are_not_kept_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """C155: an empty list, and one hint in the log which setting it needs."""
    async with client_of(make_app(FakeEngine(script([EOS])), kept_lists=("requests",))) as client:
        for _ in range(3):
            assert (await client.get("/metrics")).text == "[]"
            assert (await client.get("/perf_metrics")).text == "[]"
    assert [record.getMessage() for record in caplog.records if "is off" in record.getMessage()] == [
        "the list of iterations was read, and is always empty: enable_iter_perf_stats is off"
    ]


async def test_a_list_that_nobody_reads_is_bounded_and_says_what_it_dropped() -> None:
    """C155: the oldest records go, counted; a scrape of the counters takes no record."""
    engine = FakeEngine(script([EOS]))
    for first in range(0, MAX_RECORDS + 500, 100):
        engine.feeds.take(Feed("iterations", [b"%d" % number for number in range(first, first + 100)]))
    async with client_of(make_app(engine)) as client:
        text = (await client.get("/prometheus/metrics")).text
        assert 'trtllm_disagg_records_dropped_total{list="iterations"} 500.0' in text
        response = await client.get("/metrics")
        assert response.headers["content-type"] == "application/json"
        assert response.json() == list(range(500, MAX_RECORDS + 500))
        assert (await client.get("/metrics")).json() == []


async def test_times_of_requests_are_on_the_clock_of_the_router() -> None:
    engine = FakeEngine(script([EOS]))
    async with client_of(make_app(engine, "context")) as client:
        await client.post("/v1/completions", json=completion("x"))
        await client.post("/steady_clock_offset", json={"offset": -100.0})
        times = {"arrival_time": 250.0, "kv_cache_size": 5}
        record = {"request_id": engine.submitted[0].request_id, "perf_metrics": {"timing_metrics": times}}
        engine.feeds.take(Feed("requests", [json.dumps(record).encode()]))
        (answer,) = (await client.get("/perf_metrics")).json()
        told = answer["perf_metrics"]["timing_metrics"]
        assert told["arrival_time"] == 150.0 and told["kv_cache_size"] == 5 and "server_arrival_time" in told


# ---------------------------------------------------------------------- events


async def test_event_stream_over_a_socket() -> None:
    engine = FakeEngine(script([EOS]))
    engine.resident = [b"k" * 16]
    app = make_app(engine, "context")
    async with (
        served(app) as (host, port),
        httpx.AsyncClient() as client,
        client.stream("GET", f"http://{host}:{port}/kv_events/stream") as response,
    ):
        lines = response.aiter_lines()
        first = json.loads(await anext(lines))
        assert (first["incarnation"], first["seq"]) == ("fake-1", 0)
        assert first["events"][0]["cleared"]
        engine.events.put_nowait(KvEvent(removed=[b"k" * 16]))
        second = json.loads(await anext(lines))
        assert second["seq"] == 1
        assert second["events"][0]["removed"]
        app.state.worker.stopping.set()
        with pytest.raises(StopAsyncIteration):
            await anext(lines)


async def test_without_reuse_there_are_no_events_rather_than_none_ever() -> None:
    """C110: a router that routes by them says so, instead of taking the cache for empty."""
    async with client_of(make_app(FakeEngine(script([EOS])), block_reuse=False)) as client:
        response = await client.get("/kv_events/stream")
    assert response.status_code == 400 and "enable_block_reuse" in response.json()["error"]["message"]


async def test_event_stream_keeps_alive_with_empty_batches() -> None:
    engine = FakeEngine(script([EOS]))
    stopping, lines = asyncio.Event(), []

    async def send(message: Any) -> None:
        if message.get("body"):
            lines.append(json.loads(message["body"]))
        if len(lines) == 4:
            stopping.set()

    await EventStream(engine, stopping, Reply(send), keep_alive=0.01).run()
    assert [line["seq"] for line in lines] == list(range(len(lines)))
    assert "events" in lines[0]
    assert all(not line.get("events") for line in lines[1:])


@pytest.mark.parametrize("given", [None, 0.0, 0.9, 1])
async def test_the_priority_reaches_the_engine_on_either_leg(given: float | None) -> None:
    for params in ({}, {"disaggregated_params": context_only()}):
        engine = FakeEngine(script([EOS]))
        fields = {} if given is None else {"priority": given}
        async with client_of(make_app(engine, "context")) as client:
            assert (await client.post("/v1/completions", json=completion("x", **fields, **params))).status_code == 200
        assert engine.submitted[0].priority == (0.5 if given is None else given)


@pytest.mark.parametrize("given", [-0.1, 1.5, "high"])
async def test_a_priority_outside_0_to_1_is_refused(given: object) -> None:
    async with client_of(make_app(FakeEngine(script([EOS])), "context")) as client:
        response = await client.post("/v1/completions", json=completion("x", priority=given))
    assert response.status_code == 400 and response.json()["error"]["param"] == "priority"
