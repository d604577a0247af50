"""Disaggregated == aggregated: same tokens, text, finish reason and usage, on both hand-off paths."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cluster_pair import Pair
from cluster_rig import Reply, baseline, complete, gauges

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(280)]

WORDS = [
    "apple",
    "river",
    "stone",
    "house",
    "tree",
    "blue",
    "green",
    "wind",
    "cloud",
    "rain",
    "sun",
    "moon",
    "star",
    "fish",
    "bird",
    "horse",
    "lion",
    "road",
]
FACTS = ["capital of France", "capital of Japan", "opposite of hot", "largest planet", "number after nine"]


def prompts(count: int) -> list[str]:
    """Chats of the kinds that the bundled model was trained on, 10 to 300 tokens long, some sharing prefixes."""
    rng = random.Random(7)
    made = []
    for number in range(count):
        kind = number % 4
        if kind == 0:
            text = "Repeat: " + " ".join(rng.choices(WORDS, k=rng.randint(2, 40)))
        elif kind == 1:
            names = rng.sample(WORDS, rng.randint(2, 12))
            pairs = " ".join(f"The code of {name} is {rng.randint(0, 999)}." for name in names)
            text = f"{pairs} What is the code of {rng.choice(names)}?"
        elif kind == 2:
            first = rng.randint(0, 60)
            text = f"Count from {first} to {first + rng.randint(3, 12)}."
        else:
            text = f"What is the {rng.choice(FACTS)}?"
        made.append(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
    return made


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
}


def same(ours: Reply, reference: Reply, body: dict[str, Any]) -> None:
    assert ours.status == reference.status == 200, (ours, reference)
    assert ours.error is None, body
    assert ours.done, body
    assert ours.text == reference.text, body
    assert ours.token_ids == reference.token_ids, body
    assert ours.finish_reason == reference.finish_reason, body
    assert ours.usage is not None and reference.usage is not None, body
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert ours.usage[name] == reference.usage[name], (name, body)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_fifty_prompts(pair: Pair, sampling: str, stream: bool) -> None:
    def check(item: tuple[int, str]) -> None:
        number, prompt = item
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "seed": 1000 + number}
        body |= SAMPLING[sampling]
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        ours = complete(pair.router.url, body)
        same(ours, complete(pair.aggregated.url, body), body)
        assert ours.token_ids, "completions carry token ids"

    before = gauges(pair.generation)
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(check, enumerate(prompts(50))))
    baseline(*pair.workers)
    after = gauges(pair.generation)
    assert after["handoffs_fetched_total"] > before.get("handoffs_fetched_total", 0), "nothing was handed over"


@pytest.mark.parametrize("warm", ["none", "context", "generation", "both"])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65])
def test_lengths_around_the_block(pair: Pair, length: int, warm: str) -> None:
    """C077: no off-by-one at 1, B-1, B, B+1, 2B, 2B+1, whoever has the prefix already."""
    rng = random.Random(f"{length}{warm}{pair.transport}")
    body = {"model": "tiny", "prompt": [rng.randint(3, 900) for _ in range(length)], "max_tokens": 6, "temperature": 0}
    reference = complete(pair.aggregated.url, body)
    if warm in ("context", "both"):
        complete(pair.context.url, body | {"max_tokens": 1})
    if warm in ("generation", "both"):
        complete(pair.generation.url, body | {"max_tokens": 1})
    before = gauges(pair.generation)["fetched_blocks_total"]
    same(complete(pair.router.url, body), reference, body)
    moved = gauges(pair.generation)["fetched_blocks_total"] - before
    if pair.transport == "shm":
        reused = length // 32 if warm in ("generation", "both") else 0
        assert moved == -(-length // 32) - reused
    baseline(*pair.workers)


@pytest.mark.parametrize("length", [32, 33, 64, 65, 96])
def test_repeated_whole_blocks(pair: Pair, length: int) -> None:
    """C105: a wholly cached prompt recomputes its last block; cached_tokens counts whole blocks, never all."""
    rng = random.Random(f"repeat{length}{pair.transport}")
    body = {"model": "tiny", "prompt": [rng.randint(3, 900) for _ in range(length)], "max_tokens": 4, "temperature": 0}
    replies = [complete(pair.router.url, body) for _ in range(3)]
    for reply in replies:
        same(reply, replies[0], body)
    cached = [(reply.usage or {})["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    assert cached == [0, (length - 1) // 32 * 32, (length - 1) // 32 * 32]


def test_usage_with_choices(pair: Pair) -> None:
    """C076: n choices count the prompt once and every choice's tokens, streamed or not, as the aggregated worker."""
    body = {"model": "tiny", "prompt": [5] * 33, "max_tokens": 4, "temperature": 0.8, "seed": 3, "n": 2}
    ours, reference = complete(pair.router.url, body), complete(pair.aggregated.url, body)
    assert ours.usage is not None and reference.usage is not None
    assert ours.usage["prompt_tokens"] == reference.usage["prompt_tokens"] == 33
    assert ours.usage["completion_tokens"] == reference.usage["completion_tokens"]
    assert ours.usage["total_tokens"] == 33 + ours.usage["completion_tokens"]
