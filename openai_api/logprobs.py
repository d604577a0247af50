"""Log-probabilities in OpenAI's two shapes: one entry a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai_api.assembly import TokenEntry
from openai_api.tokenizer import Tokenizer

_FLOOR = -9999.0
"""JSON has no minus infinity; OpenAI writes this for tokens that cannot be drawn."""


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's own text; a part of a character is written as OpenAI's legacy API does: bytes:\\xf0\\x9f."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenEntry]) -> dict[str, list[Any]]:
    """Parallel lists. `top_logprobs` holds the drawn token beside the best ones, as OpenAI's does."""
    return {
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": [_finite(entry.logprob.logprob) for entry in entries],
        "tokens": [token_text(tokenizer, entry.logprob.token_id) for entry in entries],
        "top_logprobs": [_top_by_text(tokenizer, entry) for entry in entries],
    }


def _top_by_text(tokenizer: Tokenizer, entry: TokenEntry) -> dict[str, float]:
    drawn = (entry.logprob.token_id, entry.logprob.logprob)
    top: dict[str, float] = {}
    for token_id, logprob in [*entry.logprob.top, drawn]:
        top.setdefault(token_text(tokenizer, token_id), _finite(logprob))
    return top


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenEntry]) -> dict[str, Any]:
    content = []
    for entry in entries:
        drawn = _chat_entry(tokenizer, entry.logprob.token_id, entry.logprob.logprob)
        drawn["top_logprobs"] = [_chat_entry(tokenizer, *candidate) for candidate in entry.logprob.top]
        content.append(drawn)
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)
