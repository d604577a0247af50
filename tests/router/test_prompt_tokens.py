"""The router's reading of prompts equals the worker's, and gives way where it would not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_worker import FakeWorker, fake_workers
from running_router import running_router

from kvstore.hashing import block_keys
from openai_api.tokenizer import Tokenizer
from router.bodies import ClientBody
from router.config import parse_config
from router.prompt_tokens import NotReadable, PromptTokens

TINY = Path(__file__).parents[1] / "models" / "tiny-chat"
TOKENIZER = Tokenizer.load(str(TINY))
TOKENS = PromptTokens(TOKENIZER, with_keys=True)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Repeat: apple river"}]


def body(chat: bool = False, **fields: Any) -> ClientBody:
    return ClientBody(json.dumps({"model": "m", **fields}).encode(), chat)


async def test_a_text_prompt() -> None:
    request = body(prompt="one two three")
    need = await TOKENS.read(request, 4)
    ids = TOKENIZER.encode("one two three", True)
    assert json.loads(request.token_ids or b"") == ids and need.num_tokens == len(ids)
    assert need.keys == block_keys(ids, 4)
    leg = json.loads(b"".join(map(bytes, request.context_leg(2**41))))
    assert leg["prompt"] == ids and leg["model"] == "m"


async def test_special_tokens_and_salt_are_the_clients() -> None:
    without = await TOKENS.read(body(prompt="one two three", add_special_tokens=False), 4)
    assert without.num_tokens == len(TOKENIZER.encode("one two three", False))
    ids = list(range(3, 20))
    salted = await TOKENS.read(body(prompt=ids, cache_salt="tenant"), 4)
    assert salted.keys == block_keys(ids, 4, "tenant") != (await TOKENS.read(body(prompt=ids), 4)).keys


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]], "x", ["x"]])
async def test_prompt_shapes_that_workers_take(prompt: Any) -> None:
    assert (await TOKENS.read(body(prompt=prompt), None)).num_tokens >= 1


async def test_a_conversation_goes_through_the_template() -> None:
    request = body(True, messages=MESSAGES)
    need = await TOKENS.read(request, 8)
    template = TOKENIZER.chat_template
    assert template is not None
    ids = TOKENIZER.encode(template.render(MESSAGES), False)
    assert need.keys == block_keys(ids, 8)
    leg = json.loads(b"".join(map(bytes, request.context_leg(2**41))))
    assert leg["prompt_token_ids"] == ids and leg["messages"] == MESSAGES


async def test_text_parts_are_text() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    plain = [{"role": "user", "content": "hi"}]
    first, second = body(True, messages=parts), body(True, messages=plain)
    await TOKENS.read(first, 8)
    await TOKENS.read(second, 8)
    assert first.token_ids == second.token_ids


async def test_long_prompts_are_hashed_off_the_loop() -> None:
    ids = [7] * 20000
    assert (await TOKENS.read(body(prompt=ids), 32)).keys == block_keys(ids, 32)


@pytest.mark.parametrize(
    ("chat", "fields"),
    [
        (False, {}),
        (False, {"prompt": ""}),
        (False, {"prompt": []}),
        (False, {"prompt": ["a", "b"]}),
        (False, {"prompt": [-1]}),
        (False, {"prompt": [True]}),
        (False, {"prompt": {"a": 1}}),
        (False, {"prompt": "x", "truncate_prompt_tokens": 3}),
        (False, {"prompt": "x", "prompt_token_ids": [1]}),
        (False, {"prompt": "x", "add_special_tokens": "yes"}),
        (False, {"prompt": "x", "cache_salt": 7}),
        (False, {"prompt": "x", "lora_request": {"name": "a"}}),
        (True, {}),
        (True, {"messages": "hi"}),
        (True, {"messages": [{"content": "hi"}]}),
        (True, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        (True, {"messages": MESSAGES, "tools": [{}]}),
        (True, {"messages": MESSAGES, "prompt_token_ids": [1]}),
        (True, {"messages": MESSAGES, "chat_template": "x"}),
        (True, {"messages": MESSAGES, "chat_template_kwargs": []}),
    ],
)
async def test_what_the_router_leaves_to_the_worker(chat: bool, fields: dict[str, Any]) -> None:
    request = body(chat, **fields)
    before = [bytes(part) for part in request.context_leg(2**41)]
    request = body(chat, **fields)
    with pytest.raises(NotReadable):
        await TOKENS.read(request, 32)
    assert [bytes(part) for part in request.context_leg(2**41)] == before


async def test_both_legs_carry_the_ids_and_the_prefix_decides() -> None:
    """Whole router: the worker that served a prompt gets the next one with the same beginning."""
    ctx = [FakeWorker("context", incarnation=f"i{place}", tokens_per_block=4) for place in range(2)]
    gen = FakeWorker("generation", incarnation="g", tokens_per_block=4)

    def opening(incarnation: str) -> bytes:
        return json.dumps({"incarnation": incarnation, "seq": 0, "events": [{"cleared": True}]}).encode() + b"\n"

    async with fake_workers(*ctx, gen):
        for worker in ctx:
            incarnation = worker.server_info["incarnation"] if worker.server_info else ""

            async def events(call: Any, incarnation: str = incarnation) -> None:
                await call.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                await call.chunk(opening(incarnation))
                await call.writer.wait_closed()

            worker.scripts["/kv_events/stream"] = events
        config = parse_config(
            {
                "model": str(TINY),
                "context_servers": {
                    "urls": [worker.address for worker in ctx],
                    "router": {"type": "kv_cache_aware"},
                },
                "generation_servers": {"urls": [gen.address]},
            }
        )
        async with running_router(config, tokenizer_path=str(TINY)) as router:
            from running_router import eventually

            await eventually(lambda: all(w.events_state == "live" for w in router.router.cluster.workers[:2]))
            prompts = {name: f"{name} " * 12 for name in ("apple", "stone")}
            for name in ("apple", "stone", "apple", "apple", "stone", "apple"):
                assert (await router.post("/v1/completions", prompt=prompts[name], max_tokens=4)).status_code == 200
            served = [{tuple(call.json["prompt"]) for call in worker.legs()} for worker in ctx]
            assert [len(prompts) for prompts in served] == [1, 1] and served[0] != served[1]
            assert router.router.metrics.predicted_cached_tokens > 0
            assert router.router.metrics.actual_cached_tokens == 6 * 2
