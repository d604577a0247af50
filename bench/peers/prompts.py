"""Request bodies with an exact number of prompt tokens, cut from the English text that ships with Python."""

from __future__ import annotations

import json
import random
from pathlib import Path
from pydoc_data import topics
from typing import Any, Protocol


class Encoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


LENGTHS = {"100": (100, 512), "8k": (8_000, 64), "64k": (64_000, 16)}
"""Tokens, and how many different prompts of that length."""
STREAM_TOKENS = 64
AFFINITY_PROMPTS = 4


def write_bodies(folder: Path, tokenizer: Encoder) -> None:
    """One file a case, one request a line: `plain` asks for one token, `stream1` and `stream64` for an event stream."""
    ids = tokenizer.encode(_corpus(), add_special_tokens=False)
    rng = random.Random(7)
    for name, (length, count) in LENGTHS.items():
        starts = [rng.randrange(len(ids) - length) for _ in range(count)]
        prompts = [tokenizer.decode(ids[start : start + length]) for start in starts]
        _write(folder / f"{name}-plain.jsonl", prompts, max_tokens=1, stream=False)
        if name == "100":
            _write(folder / "100-stream1.jsonl", prompts, max_tokens=1, stream=True)
            _write(folder / "100-stream64.jsonl", prompts, max_tokens=STREAM_TOKENS, stream=True)
            for number, prompt in enumerate(prompts[:AFFINITY_PROMPTS]):
                _write(folder / f"100-one{number}.jsonl", [prompt], max_tokens=1, stream=False)


def _corpus() -> str:
    """Without "@", by which the load generator knows a token. Stars and blank runs are laid out as prose is."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return " ".join(text.replace("@", "#").replace("*", "").split(" "))


def _write(path: Path, prompts: list[str], **fields: Any) -> None:
    """Without blanks in the JSON, as most clients send it."""
    with path.open("w") as file:
        for prompt in prompts:
            body = {"model": "m", "prompt": prompt, "temperature": 0, **fields}
            file.write(json.dumps(body, separators=(",", ":"), ensure_ascii=False) + "\n")
