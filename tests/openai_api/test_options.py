"""Sampling options over HTTP: what reaches the engine, and what log-probabilities look like (C036, C038)."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_engine import EOS, FakeEngine, script
from http_worker import TOKENIZER, chat, client_of, completion, make_app, sse

from engine.messages import GuidedDecoding, SamplingParams, Submit, TokenLogprob


def says(text: str) -> FakeEngine:
    return FakeEngine(script([*TOKENIZER.encode(text), EOS]))


async def post(engine: FakeEngine, body: dict[str, Any]) -> httpx.Response:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with client_of(make_app(engine)) as client:
        return await client.post(path, json=body)


async def sampling_of(**fields: Any) -> SamplingParams:
    engine = says("x")
    response = await post(engine, completion(**fields))
    assert response.status_code == 200, response.text
    return engine.submitted[0].sampling


async def refusal_of(body: dict[str, Any]) -> tuple[int, str]:
    engine = says("x")
    response = await post(engine, body)
    assert not engine.submitted
    return response.status_code, response.json()["error"]["param"]


# ---------------------------------------------------------------- what reaches the engine


async def test_every_option_reaches_the_engine() -> None:
    found = await sampling_of(
        min_p=0.1, top_p=0.9, top_p_min=0.2, top_p_decay=0.5, repetition_penalty=1.1, presence_penalty=-1,
        frequency_penalty=2, logit_bias={"5": -100, "7": 1.5}, min_tokens=2, ignore_eos=True, prompt_logprobs=0,
        logprobs_mode="processed_logprobs", seed=-1,
    )  # fmt: skip
    assert (found.min_p, found.top_p, found.top_p_min, found.top_p_decay) == (0.1, 0.9, 0.2, 0.5)
    assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == (1.1, -1, 2)
    assert found.logit_bias == {5: -100, 7: 1.5}
    assert (found.min_tokens, found.ignore_eos, found.prompt_logprobs, found.processed_logprobs) == (2, True, 0, True)
    assert found.seed == 2**63 - 1


async def test_nothing_is_asked_for_by_default() -> None:
    found = await sampling_of()
    plain = SamplingParams(max_tokens=found.max_tokens, seed=found.seed, temperature=found.temperature)
    assert found == plain


async def test_seeds_are_drawn_when_none_is_given() -> None:
    """C031: not the same for every request."""
    assert (await sampling_of()).seed != (await sampling_of()).seed


async def test_bad_words_are_banned_with_and_without_a_space() -> None:
    found = (await sampling_of(bad_words=["the", " of"])).bad_words
    assert TOKENIZER.encode(" the", add_special_tokens=False) in found
    assert TOKENIZER.encode("the", add_special_tokens=False) in found
    assert TOKENIZER.encode(" of", add_special_tokens=False) in found


async def test_formats_reach_the_engine_checked() -> None:
    found = await sampling_of(response_format={"type": "regex", "regex": "a+"})
    assert found.guided == GuidedDecoding("regex", "a+")
    assert (await sampling_of(response_format={"type": "text"})).guided is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"1024": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"return_context_logits": True}, "return_context_logits"),
    ],
)
async def test_refusals(fields: dict[str, Any], param: str) -> None:
    assert await refusal_of(completion(**fields)) == (400, param)
    assert await refusal_of(chat(**fields)) == (400, param)


# ---------------------------------------------------------------- chat log-probabilities


@pytest.mark.parametrize(("top", "expected"), [(None, 0), (0, 0), (2, 2)])
async def test_chat_logprobs(top: int | None, expected: int) -> None:
    body = (await post(says("hi you"), chat(logprobs=True, top_logprobs=top))).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == expected for entry in content)
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == "hi you"


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}])
async def test_chat_logprobs_that_are_refused(fields: dict[str, Any]) -> None:
    assert await refusal_of(chat(**fields)) == (400, "top_logprobs")


async def test_prompt_logprobs_of_a_chat() -> None:
    engine = says("hi")
    body = (await post(engine, chat(prompt_logprobs=1))).json()
    entries = body["prompt_logprobs"]
    ids = engine.submitted[0].prompt_ids
    assert entries[0] is None and len(entries) == len(ids)
    text = TOKENIZER.decode([ids[1]], False)
    assert entries[1] == {str(ids[1]): {"logprob": -0.25, "rank": 1, "decoded_token": text}}


# ---------------------------------------------------------------- echo


async def test_echo_with_logprobs() -> None:
    prompt = TOKENIZER.encode("Once upon a time")
    body = (await post(says(" there"), completion(prompt=prompt, echo=True, logprobs=1))).json()
    choice = body["choices"][0]
    assert choice["text"] == "Once upon a time there"
    columns = choice["logprobs"]
    count = len(prompt) + body["usage"]["completion_tokens"]
    assert {len(column) for column in columns.values()} == {count}
    assert columns["token_logprobs"][0] is None and columns["top_logprobs"][0] is None
    assert columns["token_logprobs"][1 : len(prompt)] == [-0.25] * (len(prompt) - 1)
    assert columns["token_logprobs"][len(prompt)] == -0.5
    assert columns["text_offset"] == sorted(columns["text_offset"])
    for token, offset in list(zip(columns["tokens"], columns["text_offset"], strict=True))[:-1]:
        assert choice["text"][offset:].startswith(token)


async def test_echo_without_logprobs_asks_the_engine_for_none() -> None:
    engine = says(" there")
    choice = (await post(engine, completion(prompt="Once", echo=True, n=2))).json()["choices"][1]
    assert (choice["text"], choice["logprobs"]) == ("Once there", None)
    assert engine.submitted[0].sampling.prompt_logprobs is None


async def test_echo_of_the_prompt_alone() -> None:
    """C038: max_tokens 0 scores the prompt; what the engine has to generate does not show."""
    body = (await post(says(" there"), completion(prompt="Once", max_tokens=0, echo=True, logprobs=0))).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("Once", "length", [])
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("max_tokens", [0, 8])
async def test_echo_in_a_stream(max_tokens: int) -> None:
    fields = {"prompt": "Once upon", "echo": True, "logprobs": 1, "n": 2, "max_tokens": max_tokens}
    whole = (await post(says(" a time"), completion(**fields))).json()["choices"]
    events = sse((await post(says(" a time"), completion(**fields, stream=True))).text)
    for index in range(2):
        pieces = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
        assert "".join(piece["text"] for piece in pieces) == whole[index]["text"]
        for name, column in whole[index]["logprobs"].items():
            assert [value for piece in pieces for value in piece["logprobs"][name]] == column
        assert pieces[-1]["finish_reason"] == whole[index]["finish_reason"]


# ---------------------------------------------------------------- best_of


class Ranked(FakeEngine):
    """Choice i says word i; the later, the likelier."""

    def _logprobs(self, request: Submit, tokens: Any) -> list[TokenLogprob] | None:
        if request.sampling.logprobs is None:
            return None
        words = [TOKENIZER.encode(word)[0] for word in WORDS]
        return [TokenLogprob(token, words.index(token) - 10.0 if token in words else -0.1) for token in tokens]


WORDS = ["a", "b", "c", "d"]


def ranked() -> Ranked:
    return Ranked(lambda request, index: [*TOKENIZER.encode(WORDS[index]), EOS])


async def test_best_of_gives_the_likeliest_first() -> None:
    body = (await post(ranked(), completion(n=2, best_of=4))).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "d"), (1, "c")]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 8


async def test_best_of_n_is_in_order_of_generation() -> None:
    engine = ranked()
    body = (await post(engine, completion(n=3, best_of=3))).json()
    assert [choice["text"] for choice in body["choices"]] == WORDS[:3]
    assert engine.submitted[0].sampling.logprobs is None
