"""The client's side of the data path: uvicorn's HTTP protocol with the two hot routes taken out.

uvicorn parses every request and keeps its rules for keep-alive, pipelining and shutdown. A POST to a hot route becomes
a `ClientRequest` in the place of uvicorn's request cycle, and never enters the framework; its answer is written
straight to the transport. Everything else goes on to the application.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvstore.errors import InternalError, NotReady, RequestTooLarge, ServingError
from router.bodies import CHAT, COMPLETIONS, error_body
from router.chunked import LAST_CHUNK, frame, unframe
from router.http_client import Connection

if TYPE_CHECKING:
    from router.orchestrate import Orchestrator

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 * 1024 * 1024
HOT_ROUTES = frozenset((COMPLETIONS, CHAT))
JSON = b"application/json"
SESSION_HEADERS = (b"x-session-id", b"x-correlation-id", b"x-session-affinity", b"x-multi-turn-session-id")
"""Names of the conversation, the first one wins."""
_MAX_REQUEST_ID = 128
_SAFE_ID = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/+=@")


class _NoEvent:
    """uvicorn wakes its request cycles through an event; ours are woken otherwise."""

    def set(self) -> None:
        pass


_NO_EVENT = _NoEvent()


class ClientRequest:
    """One request on a hot route and the writer of its answer.

    Its task is uvicorn's, so shutdown waits for it. Losing the client cancels the task.
    """

    body = b""  # uvicorn's receive buffer; the parts are kept in `_parts`

    def __init__(self, door: FrontDoorProtocol, chat: bool, headers: list[tuple[bytes, bytes]], keep_alive: bool):
        self.arrived = time.monotonic()
        self.queued = 0.0  # seconds from arrival to the first leg
        self.chat = chat
        self.path = CHAT if chat else COMPLETIONS
        self.keep_alive = keep_alive
        self.expects_continue = False
        self.request_id = b""
        self.wants_metrics = False
        self.authorization = b""
        self.cors_lines = b""
        self.session = b""  # the client's name for the conversation
        self.trace_lines = b""  # W3C trace context, passed on as it came
        self.started = False  # bytes of the answer have been written
        self.response_complete = False
        self.disconnected = False
        self.more_body = True
        self.message_event = _NO_EVENT
        self._door = door
        self._transport = door.transport
        self._framed = True  # the client reads chunked bodies
        self._parts: list[bytes] = []
        self._size = 0
        self._too_large = False
        self._whole: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._source: Connection | None = None
        self._last = b""
        self._read_headers(headers)

    def _read_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        session_rank = len(SESSION_HEADERS)
        for name, value in headers:
            if name == b"x-request-id":
                if 0 < len(value) <= _MAX_REQUEST_ID and _SAFE_ID.issuperset(value):
                    self.request_id = value
            elif name == b"x-trtllm-return-metrics":
                self.wants_metrics = value.strip() == b"1"
            elif name == b"authorization":
                self.authorization = value
            elif name == b"origin":
                self.cors_lines = self._door.orchestrator.origins.header_lines(value)
            elif name in SESSION_HEADERS:
                if value and SESSION_HEADERS.index(name) < session_rank:
                    self.session, session_rank = value, SESSION_HEADERS.index(name)
            elif name == b"traceparent" or name == b"tracestate":
                self.trace_lines += b"%b: %b\r\n" % (name, value)
            elif name == b"content-length":
                self._too_large = int(value) > MAX_REQUEST_BYTES
            elif name == b"expect":
                self.expects_continue = value.lower() == b"100-continue"

    # ------------------------------------------------------------ called by the protocol

    async def run_asgi(self, app: Any) -> None:
        """Named as uvicorn's cycle; `app` is not used."""
        self._task = asyncio.current_task()
        try:
            await self._door.orchestrator.serve(self)
        except asyncio.CancelledError:
            if not self.disconnected:  # shutdown ran out of patience
                self.fail(NotReady("the router is shutting down"))
                raise
        except Exception:  # the last border: a bug answers 500 and is logged, and the server goes on
            logger.exception("a request failed in the router itself")
            self.fail(InternalError("internal error of the router"))

    def add_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_REQUEST_BYTES:
            self._too_large = True
            self._parts.clear()
        if self._too_large:
            self._wake()
        else:
            self._parts.append(data)

    def end_body(self) -> None:
        self.more_body = False
        self._wake()

    def _wake(self) -> None:
        if self._whole is not None and not self._whole.done():
            self._whole.set_result(None)

    def client_gone(self) -> None:
        self.disconnected = True
        if self._task is not None and not self.response_complete:
            self._task.cancel()

    def pause(self) -> None:
        """The client reads more slowly than the worker writes."""
        if self._source is not None:
            self._source.pause()

    def resume(self) -> None:
        if self._source is not None:
            self._source.resume()

    def use_http_1_0(self) -> None:
        self._framed = False

    # ------------------------------------------------------------ called by the orchestrator

    async def read_body(self) -> bytes:
        """Raises RequestTooLarge; the connection is closed after that answer."""
        if self.more_body and not self._too_large:
            if self.expects_continue:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._whole = asyncio.get_running_loop().create_future()
            await self._whole
        if self._too_large:
            self.keep_alive = self.keep_alive and not self.more_body
            raise RequestTooLarge(f"the request body has more than {MAX_REQUEST_BYTES} bytes")
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def respond(self, status: int, body: bytes, content_type: bytes = JSON, headers: bytes = b"") -> None:
        """A whole answer. `headers` are further lines, each with its line end."""
        self._check_client()
        self._transport.write(
            b"%b%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b"
            % (self._head(status), headers, content_type, len(body), self._connection_line(), body)
        )
        self._complete()

    def start_stream(self, content_type: bytes, headers: bytes) -> None:
        """Everything given to `relay` from here on is the answer's body."""
        self._check_client()
        if not self._framed:
            self.keep_alive = False
        framing = b"transfer-encoding: chunked\r\n" if self._framed else b""
        self._transport.write(
            b"%b%bcontent-type: %b\r\n%bcache-control: no-cache\r\nx-accel-buffering: no\r\n%b\r\n"
            % (self._head(200), headers, content_type, framing, self._connection_line())
        )

    def _check_client(self) -> None:
        """A failure can overtake the cancellation by which a lost client ends its request: there is no one to tell."""
        if self.disconnected:
            raise asyncio.CancelledError

    def relay(self, wire: bytes) -> None:
        self._last = wire
        self._transport.write(wire if self._framed else unframe(wire))

    def relay_events(self, events: bytes) -> None:
        """Event-stream bytes of the router's own."""
        self.relay(frame(events))

    def attach(self, source: Connection | None) -> None:
        self._source = source
        if source is not None and self._door.flow.write_paused:
            source.pause()

    def end_stream(self) -> None:
        if self._framed:
            self._transport.write(LAST_CHUNK)
        self._complete()

    def fail(self, error: ServingError) -> None:
        """Tell the client: as a status while nothing was sent, else as the stream's last event."""
        if self.disconnected or self.response_complete:
            return
        if not self.started:
            retry = b"" if error.retry_after is None else b"retry-after: %d\r\n" % max(1, round(error.retry_after))
            self.respond(error.status, error_body(error), headers=self.request_id_line() + retry)
            return
        payload = b"data: " + error_body(error) + b"\n\n"
        if self._last and not unframe(self._last).endswith(b"\n\n"):
            payload = b"\n\n" + payload  # ends an event of which only a part was sent
        self.keep_alive = False
        self.relay_events(payload)
        self.end_stream()

    def request_id_line(self) -> bytes:
        return b"x-request-id: %b\r\n" % self.request_id if self.request_id else b""

    def _head(self, status: int) -> bytes:
        self.started = True
        return STATUS_LINE[status] + self._door.default_header_lines() + self.cors_lines

    def _connection_line(self) -> bytes:
        return b"" if self.keep_alive else b"connection: close\r\n"

    def _complete(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self._transport.close()
        self._door.request_done(self)


class FrontDoorProtocol(HttpToolsProtocol):
    """`orchestrator` is set on a subclass made for one server (`protocol_for`)."""

    orchestrator: Orchestrator
    _rendered_from: list[tuple[bytes, bytes]] | None = None
    _rendered = b""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unfinished: list[ClientRequest] = []  # being answered, or waiting behind a pipelined one
        self._receiving: ClientRequest | None = None

    # ------------------------------------------------------------ the parser's callbacks

    def on_headers_complete(self) -> None:
        if self.url.partition(b"?")[0] not in HOT_ROUTES or self.parser.get_method() != b"POST":
            super().on_headers_complete()
            return
        http_1_1 = self.parser.get_http_version() == "1.1"
        request = ClientRequest(
            self, self.url.startswith(CHAT), self.headers, http_1_1 and self.parser.should_keep_alive()
        )
        if not http_1_1:
            request.use_http_1_0()
        waiting = self.cycle is not None and not self.cycle.response_complete
        self._receiving = request
        self._unfinished.append(request)
        self.cycle = request  # type: ignore[assignment]
        if waiting:
            self.flow.pause_reading()
            self.pipeline.appendleft((request, self.app))  # type: ignore[arg-type]
            return
        task = self.loop.create_task(request.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_body(self, body: bytes) -> None:
        if self._receiving is not None:
            self._receiving.add_body(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._receiving is not None:
            self._receiving.end_body()
            self._receiving = None
        else:
            super().on_message_complete()

    # ------------------------------------------------------------ the transport's callbacks

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for request in self._unfinished:
            request.client_gone()
        self._unfinished.clear()

    def pause_writing(self) -> None:
        super().pause_writing()
        for request in self._unfinished:
            request.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        for request in self._unfinished:
            request.resume()

    # ------------------------------------------------------------ for ClientRequest

    def request_done(self, request: ClientRequest) -> None:
        self._unfinished.remove(request)
        self.on_response_complete()

    def default_header_lines(self) -> bytes:
        """uvicorn makes a new list of default headers each second."""
        headers, bound = self.server_state.default_headers, type(self)
        if headers is not bound._rendered_from:
            bound._rendered = b"".join(b"%b: %b\r\n" % pair for pair in headers)
            bound._rendered_from = headers
        return bound._rendered


def protocol_for(orchestrator: Orchestrator) -> type[FrontDoorProtocol]:
    return type("BoundFrontDoor", (FrontDoorProtocol,), {"orchestrator": orchestrator})
