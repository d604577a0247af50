"""What a client sees of the whole cluster and of one server alike: errors, chunk grammar, usage, isolation of prompts.

C002, C003, C019, C020, C106, C107, on the aggregated server and through the router.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cluster_pair import Pair
from cluster_rig import Cluster, Part, baseline, complete, events, gauges

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

SMALL = 40  # KV blocks of each worker: rounds of 20 prompts at once must evict


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Cluster(tmp_path_factory.mktemp("front")) as cluster:
        yield Pair(cluster, "shm", kv_cache_config={"max_tokens": SMALL * 32, "event_buffer_max_size": 1024})


@pytest.fixture(params=["aggregated", "router"])
def front(request: pytest.FixtureRequest, small_pair: Pair) -> Part:
    part: Part = getattr(small_pair, request.param)
    return part


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"model": "tiny", "prompt": "hi"'),
        ("/v1/chat/completions", b"not json"),
        ("/v1/chat/completions", b""),
        ("/v1/completions", b'["a list"]'),
        ("/v1/completions", b'{"prompt": "\xff"}'),
    ],
)
def test_malformed_bodies(front: Part, path: str, body: bytes) -> None:
    """C002"""
    response = httpx.post(front.url + path, content=body, headers={"content-type": "application/json"}, timeout=10)
    assert response.status_code == 400
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"chat": True}, "messages"),
        ({}, "prompt"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"prompt": "Hello", "max_tokens": "many", "temperature": 0}, "max_tokens"),
        ({"prompt": "Hello", "max_tokens": 8, "temperature": "hot"}, "temperature"),
        ({"prompt": "Hello", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "Hello", "stream": True, "max_tokens": 8, "top_p": 7}, "top_p"),
    ],
)
def test_bad_fields_are_named(front: Part, body: dict[str, Any], param: str) -> None:
    """C003"""
    body = dict(body)
    chat = body.pop("chat", False) or "messages" in body
    path = "/v1/chat/completions" if chat else "/v1/completions"
    response = httpx.post(front.url + path, json={"model": "tiny"} | body, timeout=10)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]


def chunks_of(front: Part, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; the last one must be [DONE]."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    with httpx.stream("POST", front.url + path, json=body | {"stream": True}, timeout=30) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        *found, last = events(response.iter_lines())
    assert last == "[DONE]"
    return [json.loads(event) for event in found]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_usage_only_when_asked_for(front: Part, kind: str) -> None:
    """C019"""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": "Say hi."}]} if kind == "chat" else {"prompt": "Hello"}
    plain = complete(front.url, body)
    *before, last = chunks_of(front, body | {"stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert plain.usage is not None
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == plain.usage[name]
    assert all(chunk.get("usage") is None for chunk in before)
    for options in ({}, {"stream_options": {"include_usage": False}}):
        assert all(chunk.get("usage") is None for chunk in chunks_of(front, body | options))


def test_chunk_grammar(front: Part) -> None:
    """C020: 50 random prompts, one to three choices."""
    rng = random.Random(20)
    words = ["count", "apple", "river", "seven", "Repeat:", "blue", "What is"]
    for number in range(50):
        content = " ".join(rng.choices(words, k=rng.randint(1, 6)))
        body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 1}
        body |= {"max_tokens": rng.randint(1, 12), "n": rng.randint(1, 3), "seed": number}
        whole = httpx.post(front.url + "/v1/chat/completions", json=body, timeout=30).json()
        chunks = chunks_of(front, body)
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
        for index, choice in enumerate(whole["choices"]):
            parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert parts[0]["delta"]["role"] == "assistant"
            assert not any("role" in part["delta"] for part in parts[1:])
            assert "".join(part["delta"].get("content") or "" for part in parts) == choice["message"]["content"]
            reasons = [part["finish_reason"] for part in parts]
            assert [reason for reason in reasons if reason is not None] == [choice["finish_reason"]]
            assert choice["finish_reason"] in ("stop", "length")
            assert "" not in reasons


def alone(small_pair: Pair, prompts: list[list[int]]) -> list[str]:
    """Answers computed one at a time without looking into any cache: each under a cache salt of its own."""
    return [
        complete(small_pair.aggregated.url, request(prompt) | {"cache_salt": f"alone-{number}"}).text
        for number, prompt in enumerate(prompts)
    ]


def request(prompt: list[int]) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0}


def test_divergence_inside_a_block(small_pair: Pair) -> None:
    """C107: 100 prompts with 40 common ids, 20 at a time, three rounds, in a pool that must evict."""
    base = [5 + i % 90 for i in range(40)]
    prompts = [[*base, *[100 + number] * 30] for number in range(100)]
    expected = alone(small_pair, prompts)
    evicted = gauges(small_pair.context)["kv_evictions_total"]
    for front in (small_pair.aggregated, small_pair.router):
        with ThreadPoolExecutor(20) as clients:
            for _ in range(3):
                replies = clients.map(complete, [front.url] * 100, map(request, prompts))
                assert [reply.text for reply in replies] == expected
    assert gauges(small_pair.context)["kv_evictions_total"] > evicted
    baseline(*small_pair.workers, small_pair.aggregated)


def test_an_evicted_beginning_makes_the_rest_useless(small_pair: Pair) -> None:
    """C106: whatever others have thrown out of the cache, cached_tokens tells a prefix that is there, and the answer
    is that of a cold run."""
    rng = random.Random(106)
    prompts = [[rng.randint(3, 900) for _ in range(32 * 6)] for _ in range(12)]  # more than the pool can keep
    expected = alone(small_pair, prompts)
    for _ in range(3):
        order = list(range(12))
        rng.shuffle(order)
        for number in order:
            reply = complete(small_pair.router.url, request(prompts[number]))
            assert reply.text == expected[number]
            assert reply.usage is not None
            cached = reply.usage["prompt_tokens_details"]["cached_tokens"]
            assert cached % 32 == 0
            assert cached < 32 * 6
