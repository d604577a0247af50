"""C051, C052, C065, C071–C074: all sampling options, log-probabilities and formats, through the router as on one
worker."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cluster_pair import Pair
from cluster_rig import Part, baseline
from golden_requests import difference, random_body

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(280)]

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y", 7]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def post(part: Any, body: dict[str, Any]) -> tuple[int, Any]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = httpx.post(part.url + path, json=body, timeout=60)
    return response.status_code, response.json()


def seen(answer: tuple[int, Any]) -> Any:
    """Without what differs by time and by where the prompt was computed."""
    status, document = answer
    if status != 200:
        return status, document["error"]["code"], document["error"]["param"]
    for choice in document["choices"]:
        choice.pop("disaggregated_params", None)
    usage = {name: document["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"choices": document["choices"], "usage": usage}


def test_random_options(pair: Pair) -> None:
    rng = random.Random(11)
    bodies = [random_body(rng) | {"model": "tiny"} for _ in range(100)]

    def check(body: dict[str, Any]) -> str | None:
        found = difference(seen(post(pair.aggregated, body)), seen(post(pair.router, body)))
        return found and f"{body}: {found}"

    with ThreadPoolExecutor(8) as clients:
        assert [found for found in clients.map(check, bodies) if found] == []
    baseline(*pair.workers)


@pytest.fixture(scope="module")
def ahead(pair: Pair) -> Part:
    """A router that has the generation worker make room before the context worker computes."""
    return pair.cluster.router({"schedule_style": "generation_first"}, name="ahead").start()


def streamed(part: Part, body: dict[str, Any]) -> Any:
    """The events of a stream added up, in the shape of `seen`."""
    request = body | {"stream": True, "stream_options": {"include_usage": True}}
    response = httpx.post(part.url + "/v1/completions", json=request, timeout=60)
    if response.status_code != 200:
        return seen((response.status_code, response.json()))
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    choices: dict[int, dict[str, Any]] = {}
    for new in (choice for event in events for choice in event["choices"]):
        whole = choices.setdefault(new["index"], {"text": "", "token_ids": [], "logprobs": {}, "end": None})
        assert whole["end"] is None, "nothing after the end"
        whole["text"] += new["text"]
        whole["token_ids"] += new["token_ids"]
        for name, column in (new["logprobs"] or {}).items():
            whole["logprobs"].setdefault(name, []).extend(column)
        whole["end"] = new["finish_reason"] and [new["finish_reason"], new["stop_reason"]]
    usage = {name: events[-1]["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


@pytest.mark.parametrize("style", ["context_first", "generation_first"])
def test_random_options_of_either_style(pair: Pair, ahead: Part, style: str) -> None:
    """C065: whole and streamed, whichever worker is asked first."""
    router = ahead if style == "generation_first" else pair.router
    rng = random.Random(f"{style}{pair.transport}")
    bodies = [random_body(rng) | {"model": "tiny"} for _ in range(60)]

    def check(body: dict[str, Any]) -> str | None:
        found = difference(seen(post(pair.aggregated, body)), seen(post(router, body)))
        body = {name: value for name, value in body.items() if name != "best_of"}  # it is refused in streams
        found = found or difference(streamed(pair.aggregated, body), streamed(router, body))
        return found and f"{body}: {found}"

    with ThreadPoolExecutor(8) as clients:
        assert [found for found in clients.map(check, bodies) if found] == []
    baseline(*pair.workers)


def test_chat_logprobs(pair: Pair) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say hi."}],
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 5,
    }
    ours = post(pair.router, body)
    assert difference(seen(post(pair.aggregated, body)), seen(ours)) is None
    content = ours[1]["choices"][0]["logprobs"]["content"]
    assert len(content) == ours[1]["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 5 for entry in content)


def test_formats_hold_for_every_seed(pair: Pair) -> None:
    """C074: the first token is masked on the context worker, the next ones go on from it."""
    for seed in range(20):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Say hi."}],
            "max_tokens": 60,
            "temperature": 1,
            "seed": seed,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        }
        status, document = post(pair.router, body)
        assert status == 200
        choice = document["choices"][0]
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["message"]["content"])
        assert set(value) == {"a", "b"} and value["a"] in ("x", "y", 7) and value["b"] in (True, False)


def test_an_answer_that_its_format_ends_at_the_hand_off(pair: Pair) -> None:
    body = {
        "model": "tiny",
        "prompt": "x",
        "temperature": 0,
        "response_format": {"type": "ebnf", "ebnf": 'root ::= "a"'},
    }
    ours = post(pair.router, body)
    assert seen(ours) == seen(post(pair.aggregated, body))
    assert (ours[1]["choices"][0]["text"], ours[1]["choices"][0]["finish_reason"]) == ("a", "stop")
    baseline(*pair.workers)


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


BAD_FORMATS: list[dict[str, Any]] = [
    schema_format("x"),
    schema_format({"type": "nope"}),
    schema_format({"properties": {"foo": "bar"}}),
    schema_format({"$ref": "#"}),
    schema_format({"type": "array", "uniqueItems": True}),
    {"type": "json_schema"},
    {"type": "regex", "regex": "a("},
]


def test_bad_formats_harm_nobody(pair: Pair) -> None:
    """C052: many in a row are 400 each, and the next request is served at once."""
    for stream in (False, True):
        for response_format in BAD_FORMATS * 2:
            bad = {"model": "tiny", "prompt": "x", "max_tokens": 4, "stream": stream}
            status, document = post(pair.router, bad | {"response_format": response_format})
            assert (status, document["error"]["param"]) == (400, "response_format")
    assert post(pair.router, {"model": "tiny", "prompt": "x", "max_tokens": 4})[0] == 200
    baseline(*pair.workers)
