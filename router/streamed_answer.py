"""A whole answer as the event stream that the client asked for.

Needed when a request ends during prefill: the context leg never streams, and there is no generation leg.
"""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def as_event_stream(answer: bytes, chat: bool, include_usage: bool) -> bytes:
    """`answer` is a completion or chat completion object; the result ends with `data: [DONE]`."""
    whole = msgspec.json.decode(answer)
    head = {
        "id": whole.get("id"),
        "object": "chat.completion.chunk" if chat else whole.get("object", "text_completion"),
        "created": whole.get("created"),
        "model": whole.get("model"),
    }
    tail = {"usage": None} if include_usage else {}
    events = []
    for choice in whole["choices"]:
        for piece in _chat_pieces(choice) if chat else [_completion_piece(choice)]:
            events.append(event({**head, "choices": [piece], **tail}))
    if include_usage:
        events.append(event({**head, "choices": [], "usage": whole.get("usage")}))
    return b"".join([*events, DONE])


def _completion_piece(choice: dict[str, Any]) -> dict[str, Any]:
    piece = {"index": choice.get("index", 0), "text": choice.get("text", "")}
    names = ("logprobs", "finish_reason", "stop_reason", "token_ids")
    return piece | {name: choice[name] for name in names if name in choice}


def _chat_pieces(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """The role, then what was said if anything was, then the finish reason."""
    index, message = choice.get("index", 0), choice.get("message") or {}
    deltas: list[dict[str, Any]] = [{"role": message.get("role") or "assistant", "content": ""}]
    for name in ("reasoning_content", "reasoning", "content"):
        if message.get(name):
            deltas.append({name: message[name]})
    calls = message.get("tool_calls") or []
    if calls:
        deltas.append({"tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]})
    pieces: list[dict[str, Any]] = [
        {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
    ]
    extras = {name: choice[name] for name in ("logprobs", "token_ids") if choice.get(name) is not None}
    if extras:
        if len(pieces) == 1:  # tokens that show no text, as an end-of-sequence token, have these too
            pieces.append({"index": index, "delta": {"content": ""}, "logprobs": None, "finish_reason": None})
        pieces[-1] |= extras
    pieces.append(
        {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": choice.get("finish_reason"),
            "stop_reason": choice.get("stop_reason"),
        }
    )
    return pieces
