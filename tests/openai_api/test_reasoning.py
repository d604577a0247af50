"""C075: reasoning is told from the answer by tags, however the text is cut, and its tokens are counted."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import EOS, FakeEngine, script
from http_worker import TOKENIZER, chat, client_of, completion, make_app, sse
from hypothesis import given
from hypothesis import strategies as st

from openai_api.reasoning import FORMS, ReasoningSplitter

OPENED, TAGGED = FORMS["deepseek-r1"], FORMS["qwen3"]


def split(form: Any, pieces: list[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(form)
    parts = [splitter.push(piece) for piece in pieces]
    parts.append(splitter.finish())
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("form", "text", "reasoning", "answer"),
    [
        (TAGGED, "<think>a</think>b", "a", "b"),
        (TAGGED, "\n<think>a</think>b</think><think>", "a", "b</think><think>"),
        (TAGGED, "b <think>a</think>", "", "b <think>a</think>"),
        (TAGGED, "<thin", "", "<thin"),
        (TAGGED, "<think>a</thi", "a</thi", ""),
        (TAGGED, "", "", ""),
        (OPENED, "a</think>b", "a", "b"),
        (OPENED, "<think>a</think>b", "a", "b"),
        (OPENED, "</think>b", "", "b"),
        (OPENED, "never ends", "never ends", ""),
        (OPENED, "<th", "<th", ""),
    ],
)
def test_text_is_split_at_the_tags(form: Any, text: str, reasoning: str, answer: str) -> None:
    assert split(form, [text]) == (reasoning, answer)
    assert split(form, list(text)) == (reasoning, answer)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "ink>", "/", "a", " "])), st.booleans())
def test_cuts_change_nothing(pieces: list[str], opened: bool) -> None:
    form = OPENED if opened else TAGGED
    text = "".join(pieces)
    assert split(form, pieces) == split(form, [text]) == split(form, list(text))


@pytest.mark.parametrize("stream", [False, True])
async def test_chats_have_reasoning_beside_content(stream: bool) -> None:
    thought = TOKENIZER.encode("so it is</think>")
    said = [*TOKENIZER.encode("yes", add_special_tokens=False), EOS]
    app = make_app(FakeEngine(script([*thought, *said])), reasoning_parser="deepseek-r1")
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with client_of(app) as client:
        response = await client.post("/v1/chat/completions", json=chat(**options, max_tokens=64))
        plain = await client.post("/v1/completions", json=completion(max_tokens=64))
    assert plain.json()["choices"][0]["text"] == "so it is</think>yes"
    assert "completion_tokens_details" not in plain.json()["usage"]
    if stream:
        events = sse(response.text)[:-1]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        usage = events[-1]["usage"]
        content, reasoning = ("".join(delta.get(name) or "" for delta in deltas) for name in ("content", NAME))
    else:
        message = response.json()["choices"][0]["message"]
        content, reasoning, usage = message["content"], message[NAME], response.json()["usage"]
    assert (reasoning, content) == ("so it is", "yes")
    assert usage["completion_tokens"] == len(thought) + len(said)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(thought)}


NAME = "reasoning_content"


async def test_without_a_parser_nothing_is_split() -> None:
    async with client_of(make_app(FakeEngine(script([*TOKENIZER.encode("a</think>b"), EOS])))) as client:
        body = (await client.post("/v1/chat/completions", json=chat(max_tokens=64))).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "a</think>b"}
    assert "completion_tokens_details" not in body["usage"]
