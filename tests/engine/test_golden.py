"""The golden property, on few requests: CI's share of bench/golden.py."""

from __future__ import annotations

import random

import pytest
from golden_requests import difference, random_body
from golden_rig import check


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    differences, ties = check(count=40, seed=7)
    assert ties <= 1
    return differences


@pytest.mark.parametrize("way", ["batched", "chunked", "reuse", "preempted", "hand-off", "recomputed", "streamed"])
def test_an_answer_does_not_depend_on_how_it_is_served(found: dict[str, list[str]], way: str) -> None:
    assert found[way] == []


def test_the_comparison_sees_differences() -> None:
    assert difference({"a": [1.0, {"b": "x"}]}, {"a": [1.00001, {"b": "x"}]}) is None
    assert difference({"a": [1.0]}, {"a": [1.001]}) == ".a[0]: 1.0 and 1.001"
    assert difference({"a": 1}, {"a": 1, "b": 2}) is not None
    assert difference([1, 2], [1]) is not None


def test_the_requests_cover_the_options() -> None:
    rng = random.Random(1)
    used = {name for _ in range(200) for name in random_body(rng)}
    assert used >= {
        "best_of", "bad_words", "echo", "frequency_penalty", "ignore_eos", "logit_bias", "logprobs", "min_p",
        "min_tokens", "n", "presence_penalty", "repetition_penalty", "response_format", "seed", "stop",
        "stop_token_ids", "temperature", "top_k", "top_p", "top_p_decay", "top_p_min",
    }  # fmt: skip
