"""C034, C035, C069, C070, C071: ends of answers and text around the hand-off, from known tokens, as on one server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster_pair import Pair
from cluster_rig import SCRIPTED, Cluster, Reply, baseline, complete

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

SIDES = ["aggregated", "router"]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Cluster(tmp_path_factory.mktemp("texts"), model=SCRIPTED) as cluster:
        yield Pair(cluster, "shm")


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def asked(pair: Pair, side: str, script: str, stream: bool, **fields: Any) -> Reply:
    body: dict[str, Any] = {"model": "tiny", "prompt": f"$SCRIPT{script};", "temperature": 0} | fields
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    reply = complete(getattr(pair, side).url, body)
    assert reply.done and reply.error is None, reply
    return reply


def tokens(reply: Reply) -> int:
    assert reply.usage is not None
    return int(reply.usage["completion_tokens"])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("script", "text", "reason", "count"),
    [
        (":a|b|EOS2", "ab", "stop", 3),
        (":a|b|EOS", "ab", "stop", 3),
        (":a|b|c|d", "abc", "length", 3),
        (":EOS", "", "stop", 1),
        (":EOS2", "", "stop", 1),
        (":a|EOS2|b", "a", "stop", 2),
    ],
)
def test_every_end_token_of_the_model(
    scripted: Pair, side: str, script: str, text: str, reason: str, count: int, stream: bool
) -> None:
    """C035: each end token of generation_config ends the answer and is not shown, also as the first and as the last
    token that was allowed; it counts as one token."""
    reply = asked(scripted, side, script, stream, max_tokens=3, skip_special_tokens=False)
    assert (reply.text, reply.finish_reason, tokens(reply)) == (text, reason, count)
    baseline(*scripted.workers)


@pytest.mark.parametrize("side", SIDES)
def test_ignored_and_postponed_ends(scripted: Pair, side: str, stream: bool) -> None:
    """C034: ignore_eos ignores every end token but no stop string; min_tokens bans end tokens and stop ids before it,
    and the token of the hand-off counts towards it."""
    for end in ("EOS", "EOS2"):
        ignored = asked(scripted, side, f":a|b|{end}|c|d|e|f|g|h|i", stream, max_tokens=10, ignore_eos=True)
        assert (ignored.text, ignored.finish_reason, tokens(ignored)) == ("abcdefghi", "length", 10)
        late = asked(scripted, side, f":a|b|{end}", stream, max_tokens=10, min_tokens=5)
        assert (late.text, late.finish_reason, tokens(late)) == ("ab...", "stop", 6)
    both = asked(scripted, side, ":a|b|EOS|c|d", stream, max_tokens=10, ignore_eos=True, stop="d")
    assert (both.text, both.finish_reason) == ("abc", "stop")
    two = asked(scripted, side, ":EOS|a|EOS", stream, max_tokens=10, min_tokens=2)
    assert (two.text, tokens(two)) == (".a", 3)
    banned = asked(scripted, side, ":a|b|c", stream, max_tokens=8, min_tokens=3, stop_token_ids=[ord("a"), ord("b")])
    assert (banned.text, tokens(banned)) == ("..c", 4)
    refused = complete(
        getattr(scripted, side).url,
        {"model": "tiny", "prompt": "x", "max_tokens": 3, "min_tokens": 5, "stream": stream},
    )
    assert refused.status == 400 and refused.error is not None and refused.error["param"] == "min_tokens"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("script", "stops", "text", "count"),
    [
        (":S|x", ["S"], "", 1),
        (":ST|OP|x", ["STOP"], "", 4),
        (":aST|OP|x", ["STOP"], "a", 5),
        (":aS|x", ["SaS", "S"], "a", 2),
        ("_BYTES:\N{SLIGHTLY SMILING FACE}x", ["\N{SLIGHTLY SMILING FACE}"], "", 4),
    ],
)
def test_stop_strings_at_the_hand_off(
    scripted: Pair, side: str, script: str, stops: list[str], text: str, count: int, stream: bool
) -> None:
    """C069: a stop string that the first token completes, or begins, ends the answer; nothing of it is shown."""
    reply = asked(scripted, side, script, stream, max_tokens=8, stop=stops)
    assert (reply.text, reply.finish_reason, tokens(reply)) == (text, "stop", count)
    baseline(*scripted.workers)


@pytest.mark.parametrize("side", SIDES)
def test_the_prompts_text_is_no_part_of_a_stop_string(scripted: Pair, side: str, stream: bool) -> None:
    """C069: a prompt that ends with the stop string's beginning changes nothing, nor does the order of stop ids."""
    prompt = [*b"$SCRIPT:OP|x;"]
    reply = asked(scripted, side, "", stream, prompt=prompt, max_tokens=3, stop=[";O", ";OP"])
    assert (reply.text, reply.finish_reason) == ("OPx", "length")
    for ids in ([ord("b"), ord("c")], [ord("c"), ord("b")]):
        stopped = asked(scripted, side, ":a|b|c", stream, max_tokens=8, stop_token_ids=ids)
        assert (stopped.text, stopped.finish_reason, tokens(stopped)) == ("a", "stop", 2)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("script", "text", "count"),
    [
        ("_RAW:f09f|9982", "\N{SLIGHTLY SMILING FACE}", 4),
        ("_BYTES:\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{LATIN SMALL LETTER E WITH ACUTE}", 2),
        ("_TEXT:Hello world", "Hello world", 11),
        (": x", " x", 2),
        (": | x", "  x", 3),
    ],
)
def test_characters_and_spaces_at_the_hand_off(
    scripted: Pair, side: str, script: str, text: str, count: int, stream: bool
) -> None:
    """C070: a character whose first byte is the first token shows once and whole, and a leading space stays."""
    reply = asked(scripted, side, script, stream, max_tokens=count)
    assert (reply.text, reply.finish_reason, tokens(reply)) == (text, "length", count)
    assert "\N{REPLACEMENT CHARACTER}" not in reply.text


def test_the_first_chunk_carries_its_log_probabilities(scripted: Pair) -> None:
    """C071: whatever token ends up in which chunk, each event has one entry for each of its tokens."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "$SCRIPT:A|B|C"}], "max_tokens": 3}
    body |= {"temperature": 0, "logprobs": True, "top_logprobs": 2, "stream": True}
    found = {}
    for side in SIDES:
        answer = httpx.post(getattr(scripted, side).url + "/v1/chat/completions", json=body, timeout=30).text
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        content = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
        assert [entry["token"] for entry in content] == ["A", "B", "C"]
        first = next(choice for choice in choices if choice["delta"].get("content"))
        assert first["logprobs"]["content"][0]["token"] == "A"
        found[side] = content
    assert found["router"] == found["aggregated"]
