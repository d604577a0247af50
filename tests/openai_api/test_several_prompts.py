"""Several prompts in one completion request: one answer, choices numbered over all of them (C038)."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_engine import EOS, FakeEngine, dying
from http_worker import TOKENIZER, client_of, completion, make_app, sse


def echoing() -> FakeEngine:
    """Answers with the prompt's last token and the number of the choice."""
    digits = [TOKENIZER.encode(str(index), add_special_tokens=False)[0] for index in range(4)]
    return FakeEngine(lambda request, index: [request.prompt_ids[-1], digits[index], EOS])


async def post(engine: FakeEngine, body: dict[str, Any]) -> httpx.Response:
    async with client_of(make_app(engine)) as client:
        return await client.post("/v1/completions", json=body)


async def test_choices_are_numbered_over_all_prompts() -> None:
    engine = echoing()
    body = (await post(engine, completion(prompt=[[5, 65], [66]], n=2))).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (index, TOKENIZER.decode([token]) + digit)
        for index, (token, digit) in enumerate([(65, "0"), (65, "1"), (66, "0"), (66, "1")])
    ]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 12
    assert len({submit.request_id for submit in engine.submitted}) == 2


async def test_prompts_as_text_and_mixed() -> None:
    engine = echoing()
    assert (await post(engine, completion(prompt=["a b", [7]]))).status_code == 200
    assert [submit.prompt_ids for submit in engine.submitted] == [TOKENIZER.encode("a b"), [7]]


async def test_prompts_alone_are_scored() -> None:
    body = (await post(echoing(), completion(prompt=[[5, 6, 7], [8, 9]], max_tokens=0, echo=True, logprobs=2))).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["logprobs"]["token_logprobs"] for choice in body["choices"]] == [[None, -0.25, -0.25], [None, -0.25]]
    assert body["usage"]["completion_tokens"] == 0


async def test_a_stream_of_several_prompts() -> None:
    fields: dict[str, Any] = {"prompt": [[65], [66], [67]], "n": 2, "echo": True}
    whole = (await post(echoing(), completion(**fields))).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = sse((await post(echoing(), completion(**fields, **options))).text)
    texts: dict[int, str] = {}
    for event in events[:-1]:
        assert event["id"] == events[0]["id"]
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert events[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failure_ends_all(stream: bool) -> None:
    engine = dying(echoing(), after=0)
    response = await post(engine, completion(prompt=[[65], [66]], stream=stream))
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"


async def test_a_bad_prompt_among_good_ones_reaches_no_engine() -> None:
    for prompt in ([[5], []], [[5], [4000]], [["a"], [5]], [[5], "x" * 0]):
        engine = echoing()
        response = await post(engine, completion(prompt=prompt))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
        assert not engine.submitted
    assert (await post(echoing(), completion(prompt=[[5]] * 129))).status_code == 400


async def test_legs_take_one_prompt() -> None:
    params = {"request_type": "context_only", "disagg_request_id": 1 << 41}
    response = await post(echoing(), completion(prompt=[[5], [6]], disaggregated_params=params))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


async def test_one_prompt_in_an_array_is_one_prompt() -> None:
    body = (await post(echoing(), completion(prompt=[[65]]))).json()
    assert len(body["choices"]) == 1
