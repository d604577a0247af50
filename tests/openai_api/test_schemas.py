"""C002, C003: bad requests are named; what this build cannot do is refused, not ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstore.errors import InvalidRequest
from openai_api.schemas import ChatCompletionRequest, CompletionRequest, parse_body

MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionRequest:
    return parse_body(json.dumps({"model": "m", "prompt": "p"} | fields).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_body(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode(), ChatCompletionRequest)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model": "m"', "not JSON"),
        (b"not json", "not JSON"),
        (b"", "not JSON"),
        (b"[1]", "JSON object"),
        (b'"x"', "JSON object"),
    ],
)
def test_malformed_bodies(body: bytes, says: str) -> None:
    for schema in (CompletionRequest, ChatCompletionRequest):
        with pytest.raises(InvalidRequest, match=says) as caught:
            parse_body(body, schema)
        assert caught.value.param is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"disaggregated_params": "x"}, "disaggregated_params"),
        ({"best_of": 9}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"suffix": "s"}, "suffix"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": "high"}, "repetition_penalty"),
        ({"logit_bias": {"1": 500}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"bad_words": "the"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"min_p": 1.1}, "min_p"),
        ({"top_p_min": -0.1}, "top_p_min"),
        ({"top_p_decay": 0}, "top_p_decay"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logprobs_mode": "raw"}, "logprobs_mode"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"detokenize": False}, "detokenize"),
        ({"lora_request": {"name": "x"}}, "lora_request"),
    ],
)
def test_bad_fields_of_both(fields: dict[str, Any], param: str) -> None:
    for make in (completion, chat):
        with pytest.raises(InvalidRequest) as caught:
            make(**fields)
        assert caught.value.param == param
        for word in ("Traceback", "pydantic", "Request", "instance of", "list["):
            assert word not in caught.value.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "m"}, "messages"),
        ({"messages": MESSAGES}, "model"),
        ({"model": 1, "messages": MESSAGES}, "model"),
        ({"model": "m", "messages": "hi"}, "messages"),
        ({"model": "m", "messages": []}, "messages"),
        ({"model": "m", "messages": ["hi"]}, "messages[0]"),
        ({"model": "m", "messages": [{"content": "x"}]}, "messages[0].role"),
        ({"model": "m", "messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"model": "m", "messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"model": "m", "messages": [*MESSAGES, {"role": "user"}]}, "messages[1].content"),
        ({"model": "m", "messages": MESSAGES, "logprobs": 3}, "logprobs"),
        ({"model": "m", "messages": MESSAGES, "top_logprobs": 3}, "top_logprobs"),
        ({"model": "m", "messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"model": "m", "messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
        ({"model": "m", "messages": MESSAGES, "tools": [{}], "tool_choice": "required"}, "tools"),
        ({"model": "m", "messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        ({"model": "m", "messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"model": "m", "messages": MESSAGES, "chat_template": "x"}, "chat_template"),
    ],
)
def test_bad_chat_requests(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(json.dumps(body).encode(), ChatCompletionRequest)
    assert caught.value.param == param


def test_image_parts_are_refused_by_name() -> None:
    part = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[{"role": "user", "content": [part]}])
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages[0].content[0]")


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}])
def test_bad_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


def test_values_that_change_nothing_are_accepted() -> None:
    request = completion(
        best_of=2, n=2, echo=False, suffix=None, frequency_penalty=0, presence_penalty=0.0, repetition_penalty=1.0,
        logit_bias={}, min_p=0, top_p_min=0, use_beam_search=False, response_format={"type": "text"}, user="u",
        length_penalty=1.0, early_stopping=False, priority=0.3,
        no_such_field=[1], temperature=None, max_tokens=None, stop=None, stream=None,
    )  # fmt: skip
    assert request.choices == 2
    request = chat(tools=[{"type": "function"}], tool_choice="none", logprobs=True, top_logprobs=2)
    assert request.stops == []


def test_beams_are_refused_by_the_name_of_the_setting() -> None:
    with pytest.raises(InvalidRequest, match="max_beam_width"):
        completion(use_beam_search=True)


def test_max_tokens_0_asks_about_the_prompt_only() -> None:
    assert completion(max_tokens=0, echo=True).max_tokens == 0
    assert completion(max_tokens=0, prompt_logprobs=1).max_tokens == 0


def test_chat_does_not_echo() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(echo=True)
    assert caught.value.param == "echo"


def test_stops_as_text_or_list() -> None:
    assert completion(stop="a").stops == ["a"]
    assert completion(stop=["a", "b"]).stops == ["a", "b"]


def test_usage_is_off_unless_asked_for() -> None:
    options = completion(stream=True, stream_options={}).stream_options
    assert options is not None
    assert not options.include_usage
