"""The answer to one HTTP request over ASGI: a JSON body, or server-sent events. Nothing is sent before the first call.

As long as nothing was sent, a failure is an HTTP status. Afterwards it is one `error` event and the end of the stream,
without `[DONE]`, so that a cut answer cannot be taken for a whole one.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

from kvstore.errors import ServingError, openai_error_body

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

_Header = tuple[bytes, bytes]
_EVENT_STREAM: list[_Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Reply:
    def __init__(self, send: Send) -> None:
        self._send = send
        self.streaming = False

    async def json(self, body: bytes, status: int = 200, headers: Iterable[_Header] = ()) -> None:
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body})

    async def open_stream(self, headers: Iterable[_Header] = (), content: Iterable[_Header] = _EVENT_STREAM) -> None:
        self.streaming = True
        await self._send({"type": "http.response.start", "status": 200, "headers": [*content, *headers]})

    async def event(self, data: bytes) -> None:
        await self.write(b"data: " + data + b"\n\n")

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def done(self) -> None:
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def close_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: ServingError) -> None:
        body = msgspec.json.encode(openai_error_body(error))
        if self.streaming:
            await self.event(body)
            await self.close_stream()
            return
        await self.json(body, error.status, retry_header(error))


def retry_header(error: ServingError) -> list[_Header]:
    """Retry-After, whole seconds, for errors that pass by themselves."""
    if error.retry_after is not None:
        return [(b"retry-after", str(max(1, math.ceil(error.retry_after))).encode())]
    return [(b"retry-after", b"1")] if error.status in (429, 503) else []
