"""The first token and the edges of text, with a model whose tokens are known (C024, C066, C067, C068).

The scripted model reads its script back from the KV blocks, so a lost or wrong block shows as a wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster_pair import Pair
from cluster_rig import SCRIPTED, Cluster, baseline, complete, gauges

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

EMOJI = "\u4f60\u597d \U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467 \u010f"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Cluster(tmp_path_factory.mktemp("scripted"), model=SCRIPTED) as cluster:
        yield Pair(cluster, "shm")


def body(script: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": f"$SCRIPT:{script};", "temperature": 0} | fields


def generations(pair: Pair) -> float:
    """Requests that reached the generation worker."""
    return gauges(pair.generation)["requests_total"]


@pytest.mark.parametrize("stream", [False, True])
def test_first_token_exactly_once(scripted: Pair, stream: bool) -> None:
    reply = complete(scripted.router.url, body("A|B|C|D", max_tokens=4, stream=stream, stream_options=options(stream)))
    assert reply.text == "ABCD"
    assert reply.finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage["completion_tokens"] == 4


def options(stream: bool) -> dict[str, bool] | None:
    return {"include_usage": True} if stream else None


def test_one_logprob_entry_a_token(scripted: Pair) -> None:
    request = body("A|B|C|D", max_tokens=4, logprobs=1)
    response = httpx.post(scripted.router.url + "/v1/completions", json=request, timeout=30).json()
    assert response["choices"][0]["logprobs"]["tokens"] == ["A", "B", "C", "D"]
    streamed = []
    with httpx.stream(
        "POST", scripted.router.url + "/v1/completions", json=request | {"stream": True}, timeout=30
    ) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    streamed += (choice.get("logprobs") or {}).get("tokens", [])
    assert streamed == ["A", "B", "C", "D"]


@pytest.mark.parametrize("stream", [False, True])
def test_one_token_never_reaches_generation(scripted: Pair, stream: bool) -> None:
    before = generations(scripted)
    reply = complete(scripted.router.url, body("A|B|C", max_tokens=1, stream=stream))
    assert (reply.text, reply.finish_reason) == ("A", "length")
    assert generations(scripted) == before
    baseline(*scripted.workers, limit_s=1)
    two = complete(scripted.router.url, body("A|B|C", max_tokens=2))
    assert (two.text, two.finish_reason) == ("AB", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_first_token_ends_the_answer(scripted: Pair, stream: bool) -> None:
    before = generations(scripted)
    ended = complete(scripted.router.url, body("EOS", max_tokens=8, stream=stream))
    assert (ended.text, ended.finish_reason) == ("", "stop")
    stopped = complete(scripted.router.url, body("A|B", max_tokens=8, stop_token_ids=[token_id("A")], stream=stream))
    assert stopped.finish_reason == "stop"
    stop_string = complete(scripted.router.url, body("A|B", max_tokens=8, stop="A", stream=stream))
    assert (stop_string.text, stop_string.finish_reason) == ("", "stop")
    assert generations(scripted) == before
    baseline(*scripted.workers, limit_s=1)
    on = complete(scripted.router.url, body("EOS|B|C", max_tokens=3, ignore_eos=True, stream=stream))
    assert on.finish_reason == "length"
    assert on.text == "BC"


def token_id(character: str) -> int:
    vocabulary = json.loads((SCRIPTED / "tokenizer.json").read_text())["model"]["vocab"]
    return int(vocabulary[character])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("side", ["router", "aggregated"])
def test_no_half_characters(scripted: Pair, side: str, stream: bool) -> None:
    url = getattr(scripted, side).url
    message = {"role": "user", "content": f"$SCRIPT_BYTES:{EMOJI}"}
    request = {"model": "tiny", "messages": [message], "max_tokens": 64, "temperature": 0, "stream": stream}
    reply = complete(url, request)
    assert reply.text == EMOJI
    assert reply.finish_reason == "stop"
