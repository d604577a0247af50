"""ASGI endpoints for JSON requests: read the body, run the handler, give up at once when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvstore.errors import InternalError, InvalidRequest, ServingError
from openai_api.reply import Message, Reply, Send

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Handler = Callable[[Scope, bytes, Reply], Awaitable[None]]

MAX_BODY = 64 * 1024 * 1024
"""Bytes. A context of a million tokens as decimal ids has about 8 MiB."""


class ClientGone(Exception):
    """The client closed the connection."""


class JsonEndpoint:
    """An ASGI application for one route. The handler gets scope, body and the reply to fill.

    Disconnect cancels the handler wherever it waits. ServingErrors become the OpenAI object; anything else is a fault
    of ours, logged with its traceback and answered as an internal error.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send)
        try:
            body = await _read_body(receive)
        except ClientGone:
            return
        except ServingError as error:
            await reply.fail(error)
            return
        async with asyncio.TaskGroup() as group:
            work = group.create_task(self._run(scope, body, reply))
            watch = group.create_task(_cancel_when_gone(receive, work))
            work.add_done_callback(lambda _: watch.cancel())

    async def _run(self, scope: Scope, body: bytes, reply: Reply) -> None:
        try:
            await self._handler(scope, body, reply)
        except ServingError as error:
            await reply.fail(error)
        except Exception:  # the border of the process: the client gets an answer, the log the cause
            logger.exception("%s failed", scope["path"])
            await reply.fail(InternalError("the server failed on this request; its log has the cause"))


async def _read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY:
            raise InvalidRequest(f"the request body is larger than {MAX_BODY} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


async def _cancel_when_gone(receive: Receive, work: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel("client disconnected")


def header(scope: Scope, name: bytes) -> str | None:
    """Value of the first header of this lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None
