"""Random requests over all sampling options, and the comparison of two answers. Nothing heavy is imported here."""

from __future__ import annotations

import random
from typing import Any

TOLERANCE = 1e-4  # of log-probabilities
LONGEST_PROMPT = 33  # tokens

_PREFIXES = ("The quick brown fox jumps over", "def main():\n    return", "Once upon a time there was a small house by")
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yes", "no"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_FORMATS: tuple[dict[str, Any], ...] = (
    {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}},
    {"type": "regex", "regex": "(yes|no|maybe){1,4}!"},
    {"type": "ebnf", "ebnf": 'root ::= "a" | "b" root "c"'},
    {"type": "json_object"},
)


def random_body(rng: random.Random) -> dict[str, Any]:
    """A /v1/completions body with any mix of options."""
    body: dict[str, Any] = {"model": "m", "prompt": _random_prompt(rng), "max_tokens": rng.randint(1, 14)}

    def sometimes(chance: float, name: str, value: Any) -> None:
        if rng.random() < chance:
            body[name] = value

    body["temperature"] = rng.choice((0, 0, 0.3, 1, 1, 1.7))
    body["seed"] = rng.randrange(2**63)
    sometimes(0.3, "top_p", rng.choice((0.1, 0.5, 0.9, 0.99)))
    sometimes(0.3, "top_k", rng.choice((1, 3, 20, 200, 900)))
    sometimes(0.2, "min_p", rng.choice((0.01, 0.2, 0.9)))
    sometimes(0.1, "top_p_decay", 0.8)
    sometimes(0.1, "top_p_min", 0.3)
    sometimes(0.25, "repetition_penalty", rng.choice((0.7, 1.1, 1.8)))
    sometimes(0.2, "presence_penalty", rng.choice((-1.0, 0.5, 2.0)))
    sometimes(0.2, "frequency_penalty", rng.choice((-0.5, 0.3, 2.0)))
    sometimes(0.2, "logit_bias", {str(rng.randrange(1024)): rng.uniform(-50, 50) for _ in range(rng.randint(1, 4))})
    sometimes(0.15, "bad_words", rng.sample(("the", " a", "is", "return", "e", " was a"), 2))
    sometimes(0.2, "min_tokens", rng.randint(0, body["max_tokens"]))
    sometimes(0.2, "stop", rng.sample(("the", "a", "\n", " of", "ing", "e "), 2))
    sometimes(0.2, "stop_token_ids", [rng.randrange(1024) for _ in range(20)])
    sometimes(0.4, "logprobs", rng.randint(0, 5))
    sometimes(0.1, "logprobs_mode", "processed_logprobs")
    sometimes(0.15, "echo", True)
    sometimes(0.3, "n", rng.randint(2, 4))
    if rng.random() < 0.15:
        body["best_of"] = min(8, body.get("n", 1) + rng.randint(0, 2))
    if rng.random() < 0.2:
        body["response_format"] = rng.choice(_FORMATS)
    else:
        sometimes(0.15, "ignore_eos", True)
    return body


def _random_prompt(rng: random.Random) -> str | list[int]:
    if rng.random() < 0.4:
        return rng.choice(_PREFIXES) + "".join(f" {rng.randrange(100)}" for _ in range(rng.randrange(6)))
    return [rng.randrange(3, 1024) for _ in range(rng.choice((1, 7, 8, 9, 16, 17, rng.randint(1, LONGEST_PROMPT))))]


def difference(left: Any, right: Any, place: str = "") -> str | None:
    """Where two answers differ, numbers by more than the tolerance; None if nowhere."""
    if isinstance(left, float) and isinstance(right, float):
        return None if abs(left - right) <= TOLERANCE else f"{place}: {left} and {right}"
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return next((found for key in left if (found := difference(left[key], right[key], f"{place}.{key}"))), None)
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return next((found for at, pair in pairs if (found := difference(*pair, f"{place}[{at}]"))), None)
    return None if left == right else f"{place}: {left!r} and {right!r}"
