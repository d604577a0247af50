"""Log-probabilities in OpenAI's two shapes: one entry a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.messages import TokenLogprob
from openai_api.assembly import TokenEntry
from openai_api.detokenizer import Detokenizer
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
        "token_logprobs": [_finite(entry.logprob.logprob) if entry.scored else None for entry in entries],
        "tokens": [token_text(tokenizer, entry.logprob.token_id) for entry in entries],
        "top_logprobs": [_top_by_text(tokenizer, entry) if entry.scored else None for entry in entries],
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


def echoed(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, skip_special: bool
) -> tuple[str, list[TokenEntry]]:
    """The prompt as text, and its entries if its log-probabilities (those of all tokens but the first) are there."""
    detokenizer = Detokenizer(tokenizer, skip_special)
    parts: list[str] = []
    offsets = [0]
    for token in prompt_ids:
        parts.append(detokenizer.push(token))
        offsets.append(offsets[-1] + len(parts[-1]))
    text = "".join(parts) + detokenizer.finish()
    if logprobs is None:
        return text, []
    first = TokenEntry(TokenLogprob(prompt_ids[0], 0.0), 0, scored=False)
    return text, [first, *(TokenEntry(*pair) for pair in zip(logprobs, offsets[1:], strict=False))]


def prompt_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: for each prompt token None or, by token id, the token itself and the best ones. `rank` is None for
    a token that is not among these."""
    result: list[dict[str, dict[str, Any]] | None] = [None]
    for entry in logprobs:
        ranked: dict[int, tuple[float, int | None]] = {
            token: (value, rank) for rank, (token, value) in enumerate(entry.top, 1)
        }
        ranked.setdefault(entry.token_id, (entry.logprob, None))
        result.append(
            {
                str(token): {"logprob": _finite(value), "rank": rank, "decoded_token": token_text(tokenizer, token)}
                for token, (value, rank) in ranked.items()
            }
        )
    return result


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)
