"""The OpenAI surface over a scripted engine: answers, streams, usage, errors, disconnects."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from fake_engine import EOS, FakeEngine, dying, script
from http_worker import TOKENIZER, chat, check_grammar, client_of, completion, make_app, served, sse, until

from kvstore.errors import NotReady, Overloaded
from openai_api.intake import decode_token_ids, encode_token_ids

EMOJI = "你好 \U0001f642\U0001f468‍\U0001f469‍\U0001f467 ď"
PATHS = {"/v1/completions": completion, "/v1/chat/completions": chat}


def says(text: str, *, eos: bool = True, **options: Any) -> FakeEngine:
    return FakeEngine(script(TOKENIZER.encode(text) + [EOS] * eos), **options)


async def post(engine: FakeEngine, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    async with client_of(make_app(engine)) as client:
        return await client.post(path, json=body, headers=headers)


def text_of(response: httpx.Response) -> str:
    choice = response.json()["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


# ---------------------------------------------------------------------- bad requests


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b'{"model": "tiny", "prompt": "hi"', b"not json", b""])
async def test_malformed_json(path: str, body: bytes) -> None:
    async with client_of(make_app(says("x"))) as client:
        response = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (completion(model="other"), 404, "model_not_found", "model"),
        (completion(prompt=""), 400, "invalid_request_error", "prompt"),
        (completion(prompt=[]), 400, "invalid_request_error", "prompt"),
        (completion(prompt=[1024]), 400, "invalid_request_error", "prompt"),
        (completion(prompt=[-1]), 400, "invalid_request_error", "prompt"),
        (completion(prompt=["a", ""]), 400, "invalid_request_error", "prompt"),
        (completion(prompt=[1, "b"]), 400, "invalid_request_error", "prompt"),
        (completion(prompt=[5] * 2048), 400, "context_length_exceeded", "prompt"),
        (completion(prompt=[5] * 2000, max_tokens=49), 400, "context_length_exceeded", "max_tokens"),
        (completion(min_tokens=65), 400, "invalid_request_error", "min_tokens"),
        (completion(stop_token_ids=[5000]), 400, "invalid_request_error", "stop_token_ids"),
        (completion(disaggregated_params={"request_type": "dance"}), 400, "invalid_request_error", None),
        (completion(disaggregated_params={"ctx_request_id": "x"}), 400, "invalid_request_error", None),
    ],
)
async def test_refusals(body: dict[str, Any], status: int, code: str, param: str | None) -> None:
    engine = says("x")
    response = await post(engine, "/v1/completions", body)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["code"] == code
    assert error["param"] == param or (param is None and error["param"].startswith("disaggregated_params."))
    assert not engine.submitted


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", ["prompt", "stop", "cache_salt"])
async def test_lone_surrogates_are_a_bad_request(path: str, field: str) -> None:
    """JSON can spell half of a UTF-16 pair, which is no text."""
    body = PATHS[path]("MARK") if field == "prompt" else PATHS[path](**{field: "MARK"})
    content = json.dumps(body).replace("MARK", "\\ud83d").encode()
    async with client_of(make_app(says("x"))) as client:
        response = await client.post(path, content=content)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_context_length_names_the_numbers() -> None:
    response = await post(says("x"), "/v1/completions", completion(prompt=[5] * 2000, max_tokens=49))
    message = response.json()["error"]["message"]
    assert all(number in message for number in ("2000", "49", "2049", "2048"))


async def test_unknown_routes_and_methods() -> None:
    async with client_of(make_app(says("x"))) as client:
        for method, path, status in (("GET", "/nope", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)):
            response = await client.request(method, path)
            assert response.status_code == status
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


# ---------------------------------------------------------------------- what reaches the engine


async def test_prompt_forms_are_one() -> None:
    engine, ids = says("x"), TOKENIZER.encode("Hello world")
    for prompt in ("Hello world", ["Hello world"], ids, [ids]):
        response = await post(engine, "/v1/completions", completion(prompt))
        assert response.json()["usage"]["prompt_tokens"] == len(ids)
    assert [submit.prompt_ids for submit in engine.submitted] == [ids] * 4


async def test_chat_prompts() -> None:
    engine = says("x")
    ids = TOKENIZER.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    for fields in ({}, {"prompt_token_ids": ids}, {"prompt_token_ids_b64": encode_token_ids(ids)}):
        await post(engine, "/v1/chat/completions", chat("Hello") | fields)
    assert [submit.prompt_ids for submit in engine.submitted] == [ids] * 3


def test_token_ids_as_base64() -> None:
    assert encode_token_ids([1, 2, 3]) == "AQAAAAIAAAADAAAA"
    assert decode_token_ids("AQAAAAIAAAADAAAA") == [1, 2, 3]


async def test_sampling_fields() -> None:
    engine = says("x")
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": -1, "n": 2, "min_tokens": 1, "ignore_eos": True}
    await post(engine, "/v1/completions", completion(stop_token_ids=[7], logprobs=3, cache_salt="s", **fields))
    sampling = engine.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 5, 2**63 - 1)
    assert (sampling.n, sampling.min_tokens, sampling.ignore_eos, sampling.logprobs) == (2, 1, True, 3)
    assert sampling.stop_token_ids == [7]
    assert engine.submitted[0].cache_salt == "s"


async def test_defaults_are_openais() -> None:
    engine = says("x")
    await post(engine, "/v1/completions", {"model": "tiny", "prompt": "Hello"})
    await post(engine, "/v1/chat/completions", {"model": "tiny-chat", "messages": [{"role": "user", "content": "x"}]})
    first, second = (submit.sampling for submit in engine.submitted)
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k) == (16, 1.0, 1.0, 0)
    assert second.max_tokens == 2048 - len(engine.submitted[1].prompt_ids)
    assert first.seed != second.seed
    assert first.logprobs is None


# ---------------------------------------------------------------------- answers


@pytest.mark.parametrize("path", PATHS)
async def test_whole_answer(path: str) -> None:
    engine = says("Hello there")
    engine.cached_tokens = 3
    response = await post(engine, path, PATHS[path]())
    body = response.json()
    assert text_of(response) == "Hello there"
    assert body["model"] == "tiny"
    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["index"]) == ("stop", None, 0)
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == len(TOKENIZER.encode("Hello there")) + 1
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert engine.ended and not engine.aborted


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("group", [1, 3])
async def test_stream_equals_whole(path: str, group: int) -> None:
    rng = random.Random(path)
    for n in (1, 2, 3):
        words = [" ".join(rng.choices(["one", "\U0001f642", "你好", "END"], k=6)) for _ in range(n)]
        engine = FakeEngine(lambda _, index, words=words: [*TOKENIZER.encode(words[index]), EOS], group=group)
        body = PATHS[path](n=n, stop=["END"], logprobs=1 if path == "/v1/completions" else True)
        whole = (await post(engine, path, body)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        events = sse((await post(engine, path, body | options)).text)
        streamed = check_grammar(events, "chat" in path, n)
        assert events[-2]["choices"] == []
        assert events[-2]["usage"] == whole["usage"]
        assert all(event["usage"] is None for event in events[:-2])
        for ours, theirs in zip(streamed, whole["choices"], strict=True):
            content = theirs["message"]["content"] if "chat" in path else theirs["text"]
            assert (ours["text"], ours["finish_reason"]) == (content, theirs["finish_reason"])
            logprobs = theirs["logprobs"]["content" if "chat" in path else "tokens"]
            assert len(ours["logprobs"]) == len(logprobs)
        tokens = sum(len(choice["logprobs"]) for choice in streamed)
        assert tokens == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", PATHS)
async def test_no_usage_unless_asked_for(path: str) -> None:
    events = sse((await post(says("hi"), path, PATHS[path](stream=True))).text)
    check_grammar(events, "chat" in path)
    assert not any(event.get("usage") for event in events[:-1])
    assert all(event["choices"] for event in events[:-1])


async def test_continuous_usage() -> None:
    options = {"stream": True, "stream_options": {"include_usage": False, "continuous_usage_stats": True}}
    events = sse((await post(says("a b c"), "/v1/completions", completion(**options))).text)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_one_byte_a_token(path: str, stream: bool) -> None:
    """C024 over the wire."""
    by_byte = {TOKENIZER.token_bytes(i): i for i in range(1024)}
    ids = [by_byte[EMOJI.encode()[i : i + 1]] for i in range(len(EMOJI.encode()))]
    response = await post(FakeEngine(script([*ids, EOS])), path, PATHS[path](stream=stream))
    if stream:
        assert "�" not in response.text
        assert check_grammar(sse(response.text), "chat" in path)[0]["text"] == EMOJI
    else:
        assert text_of(response) == EMOJI


async def test_chat_logprobs_shape() -> None:
    response = await post(says("hi"), "/v1/chat/completions", chat(logprobs=True, top_logprobs=2))
    entries = response.json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == response.json()["usage"]["completion_tokens"]
    assert entries[0]["token"].encode() == bytes(entries[0]["bytes"])
    assert len(entries[0]["top_logprobs"]) == 2
    assert entries[0]["logprob"] == -0.5


async def test_completion_logprobs_shape() -> None:
    response = await post(says("hi you"), "/v1/completions", completion(logprobs=1))
    logprobs = response.json()["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"][:-1]) == "hi you"
    assert logprobs["text_offset"][0] == 0
    assert {len(column) for column in logprobs.values()} == {response.json()["usage"]["completion_tokens"]}


async def test_stop_string_ends_the_engine_request() -> None:
    engine = says("one two three four five")
    response = await post(engine, "/v1/completions", completion(stop=" three"))
    choice = response.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one two", "stop", " three")
    assert engine.aborted and not engine.ended


async def test_token_ids_on_demand() -> None:
    engine = says("hi")
    body = (await post(engine, "/v1/chat/completions", chat(return_token_ids=True))).json()
    assert body["choices"][0]["token_ids"] == [*TOKENIZER.encode("hi"), EOS]
    assert body["prompt_token_ids"] == engine.submitted[0].prompt_ids
    assert "token_ids" not in (await post(engine, "/v1/chat/completions", chat())).json()["choices"][0]


async def test_timing_header() -> None:
    asked = {"x-trtllm-return-metrics": "1"}
    for stream in (False, True):
        response = await post(says("hi"), "/v1/completions", completion(stream=stream), **asked)
        entries = dict(entry.split(";dur=") for entry in response.headers["server-timing"].split(", "))
        assert {name: float(ms) for name, ms in entries.items()} == {"queue": 1.0, "prefill": 9.0, "first_token": 10.0}
    assert "server-timing" not in (await post(says("hi"), "/v1/completions", completion())).headers


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_an_error_before_the_first_token_is_a_status(path: str, stream: bool) -> None:
    engine = says("x")
    for error, status in ((NotReady("down"), 503), (Overloaded("full", retry_after=2.5), 429)):
        engine.failure = (0, error)
        response = await post(engine, path, PATHS[path](stream=stream))
        assert response.status_code == status
        assert response.json()["error"]["message"] == error.message
        assert response.headers["retry-after"] == ("3" if status == 429 else "1")


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_after_the_first_token_is_one_event(path: str) -> None:
    engine = dying(says("one two three four five"), after=3)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await post(engine, path, PATHS[path](**options))
    events = sse(response.text)
    assert response.status_code == 200
    assert events[-1]["error"]["code"] == "internal_error"
    for event in events[:-1]:
        assert all(choice["finish_reason"] is None for choice in event["choices"])
        assert not event.get("usage")


async def test_an_engine_that_stops_early_is_an_error() -> None:
    engine = says("one two three")

    def cut(request: Any, index: int) -> list[int]:
        raise ZeroDivisionError

    engine.answers = cut
    response = await post(engine, "/v1/completions", completion())
    assert response.status_code == 500
    assert "ZeroDivision" not in response.text


@pytest.mark.parametrize("free_outputs", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_aborts_at_once(stream: bool, free_outputs: int) -> None:
    engine = says("one two three four")
    engine.gate, engine.free_outputs = asyncio.Event(), free_outputs
    async with served(make_app(engine)) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        body = json.dumps(completion(stream=stream)).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: engine.submitted)
        if stream and free_outputs:
            assert b"200 OK" in await reader.readuntil(b"data: ")
        assert not engine.aborted
        writer.close()
        await until(lambda: engine.aborted, limit=1)
        await writer.wait_closed()


async def test_a_client_that_leaves_amid_its_body_is_forgotten() -> None:
    engine = says("x")
    async with served(make_app(engine)) as (host, port):
        _, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://{host}:{port}/health")).status_code == 200
    assert not engine.submitted


async def test_the_official_client() -> None:
    openai = pytest.importorskip("openai")
    async with (
        served(make_app(says("Hello there"))) as (host, port),
        openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client,
    ):
        messages = [{"role": "user", "content": "Hi"}]
        whole = await client.chat.completions.create(model="tiny", messages=messages)
        assert whole.choices[0].message.content == "Hello there"
        text = ""
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == "Hello there"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="nope", prompt="x")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt="x", max_tokens=5000)
        assert caught.value.code == "context_length_exceeded"
        assert [model.id async for model in client.models.list()] == ["tiny"]
