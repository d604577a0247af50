"""The HTTP process's side of an engine process: asyncio, and no torch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
import weakref
from collections.abc import Callable
from typing import cast

import msgspec

from engine.channel import FrameError, FrameSplitter, frame
from engine.config import EngineConfig
from engine.feeds import Feeds
from engine.mailbox import Mailbox
from engine.messages import (
    Abort,
    Arrival,
    Events,
    Failed,
    Fatal,
    Feed,
    FollowHandoff,
    FromEngine,
    HandoffFetched,
    HandoffProgress,
    HandoffWanted,
    Loading,
    Output,
    Ready,
    ReleaseHandoff,
    SetDelays,
    Shutdown,
    SnapshotEvents,
    Stats,
    Submit,
    ToEngine,
    UnfollowHandoff,
)
from kvstore.errors import SERVING_ERRORS, InternalError, NotReady, ServingError, SettingsError
from kvstore.handoff import Handle
from kvstore.protocol import KvEvent

log = logging.getLogger(__name__)

_MAX_QUEUED_EVENTS = 10_000  # of one subscriber; beyond, it is given a new snapshot instead


class OutputStream(Mailbox[Output]):
    """The outputs of one request, until every choice has finished.

    Raises the ServingError of a failed request, InternalError when the engine dies. Closing it, cancelling a wait on
    it, and dropping the last reference to it abort the request.
    """

    def __init__(self, client: EngineClient, submit: Submit) -> None:
        super().__init__()
        self._client = client
        self._request_id = submit.request_id
        self._unfinished = submit.sampling.n

    def on_leave(self) -> None:
        self._client._abort(self._request_id)

    def __del__(self) -> None:
        if not self.ended:
            self._client._abort_threadsafe(self._request_id)

    def take(self, output: Output) -> None:
        self.put(output)
        self._unfinished -= output.finish_reason is not None
        if not self._unfinished:
            self.end()


class EventStream(Mailbox[KvEvent]):
    """First a snapshot, then the changes. Ends when the engine dies."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__()
        self._client = client
        self._awaited: int | None = client._ask_snapshot()

    def take(self, message: Events) -> None:
        if self._awaited is not None:
            if message.snapshot_id != self._awaited:
                return
            self._awaited = None
        elif message.snapshot_id is not None:
            return
        if len(self) > _MAX_QUEUED_EVENTS:
            self.clear()
            self._awaited = self._client._ask_snapshot()
            return
        for event in message.events:
            self.put(event)


class _Reader(Mailbox[HandoffProgress]):
    def __init__(self, client: EngineClient, handoff_id: int) -> None:
        super().__init__()
        self._client = client
        self._handoff_id = handoff_id

    def on_leave(self) -> None:
        if self._client._readers.get(self._handoff_id) is self:
            del self._client._readers[self._handoff_id]
            self._client._write(UnfollowHandoff(self._handoff_id))

    def take(self, message: HandoffProgress) -> None:
        self.put(message)
        if message.done:
            del self._client._readers[self._handoff_id]
            self.end()


class _Channel(asyncio.Protocol):
    """Frames in, decoded messages out to the client; its end is the engine's."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._splitter = FrameSplitter()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are no subclass

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._splitter.feed(data):
                self._client._handle(self._decoder.decode(payload))
        except (FrameError, msgspec.MsgspecError):
            log.exception("the channel from the engine is broken")
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client._died()


class EngineClient:
    """One engine process. Made by `start`; everything runs on the event loop that started it."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.on_handoff_fetched: Callable[[HandoffFetched], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._dead = asyncio.Event()
        self._fatal: Fatal | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._encoder = msgspec.msgpack.Encoder()
        # Weak: the last reference to a stream is its consumer's, and losing it is an abort.
        self._streams: dict[str, weakref.ref[OutputStream]] = {}
        self._event_streams: weakref.WeakSet[EventStream] = weakref.WeakSet()
        self._snapshot_ids = itertools.count(1)
        self.feeds = Feeds()
        self._readers: dict[int, _Reader] = {}
        self.on_lease_opened: Callable[[Handle], None] | None = None
        self.on_lease_closed: Callable[[int], None] | None = None
        self.on_handoff_wanted: Callable[[HandoffWanted], None] | None = None

    @classmethod
    async def start(cls, config: EngineConfig) -> EngineClient:
        """Spawns the engine and waits until it can serve. SettingsError for a configuration that it refuses,
        InternalError when it dies on the way. A cancel ends the process."""
        client = cls()
        ours, theirs = socket.socketpair()
        try:
            # -P: a folder named engine where the server was started is not ours.
            command = [sys.executable, "-P", "-m", "engine.process", "--fd", str(theirs.fileno())]
            client._process = await asyncio.create_subprocess_exec(
                *command,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env=_environment(config),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        try:
            client._transport, _ = await client._loop.create_unix_connection(lambda: _Channel(client), sock=ours)
            client._transport.write(frame(msgspec.json.encode(config)))
            await client._ready
        except BaseException:
            await client.close(timeout=0)
            raise
        return client

    # ------------------------------------------------------------ state

    @property
    def ready(self) -> Ready:
        return self._ready.result()

    @property
    def alive(self) -> bool:
        return not self._dead.is_set()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def wait_dead(self) -> None:
        await self._dead.wait()

    def __repr__(self) -> str:
        return f"EngineClient({'alive' if self.alive else 'dead'}, {len(self._streams)} requests)"

    # ------------------------------------------------------------ requests

    def submit(self, submit: Submit) -> OutputStream:
        """NotReady when the engine is dead; ValueError for a request id in use."""
        if not self.alive:
            raise NotReady("the engine process has ended")
        if submit.request_id in self._streams:
            raise ValueError(f"request id {submit.request_id} is in use")
        stream = OutputStream(self, submit)
        self._streams[submit.request_id] = weakref.ref(stream)
        self._write(submit)
        return stream

    def release_handoff(self, handoff_id: int, incarnation: str | None = None) -> None:
        """With an incarnation: the reader's acknowledgement. Without: nobody will read the pages."""
        if self.on_lease_closed is not None:
            self.on_lease_closed(handoff_id)
        self._write(ReleaseHandoff(handoff_id, incarnation))

    def follow_handoff(self, handoff_id: int) -> Mailbox[HandoffProgress]:
        """What becomes of a hand-off here, for its reader in a generation worker. One reader each: a second one ends
        the first. Closing it forgets the reader and nothing else."""
        if (other := self._readers.pop(handoff_id, None)) is not None:
            other.end()
        reader = self._readers[handoff_id] = _Reader(self, handoff_id)
        if self.alive:
            self._write(FollowHandoff(handoff_id))
        else:
            reader.end()
        return reader

    def arrive(self, message: Arrival) -> None:
        """What another worker has told of a hand-off that a request here awaits."""
        self._write(message)

    def set_delays(self, seconds: dict[str, float]) -> None:
        self._write(SetDelays(seconds))

    # ------------------------------------------------------------ events

    async def snapshot_events(self) -> KvEvent:
        """One event: cleared, and all keys that are resident."""
        async for event in self.subscribe_events():
            return event
        raise NotReady("the engine process has ended")

    def subscribe_events(self) -> EventStream:
        """First a snapshot event, then every change in order. A subscriber that falls far behind is given another
        snapshot. Ends when the engine dies."""
        stream = EventStream(self)
        if self.alive:
            self._event_streams.add(stream)
        else:
            stream.end()
        return stream

    def _ask_snapshot(self) -> int:
        snapshot_id = next(self._snapshot_ids)
        self._write(SnapshotEvents(snapshot_id))
        return snapshot_id

    # ------------------------------------------------------------ the end

    async def close(self, timeout: float = 10.0) -> None:
        """Ask the engine to end, wait `timeout` seconds, kill. Open requests fail. Idempotent."""
        process = self._process
        if process is None:
            return
        self._write(Shutdown())
        try:
            await asyncio.wait_for(self._exited(process), timeout)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                process.kill()
            await self._exited(process)
        finally:
            if self._transport is not None:
                self._transport.abort()

    async def _exited(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self._died()

    def _died(self) -> None:
        if self._dead.is_set():
            return
        self._dead.set()
        if not self._ready.done():
            self._ready.set_exception(self._start_error())
        streams, self._streams = self._streams, {}
        for reference in streams.values():
            if (stream := reference()) is not None:
                stream.end(InternalError("the engine process has ended"))
        for event_stream in list(self._event_streams):
            event_stream.end()
        for reader in list(self._readers.values()):
            reader.end()

    def _start_error(self) -> Exception:
        if self._fatal is not None and self._fatal.problems:
            return SettingsError(self._fatal.problems)
        cause = self._fatal.message if self._fatal is not None else "no last words"
        return InternalError(f"the engine process ended during start-up: {cause}")

    # ------------------------------------------------------------ messages

    def _write(self, message: ToEngine) -> None:
        if self.alive and self._transport is not None:
            self._transport.write(frame(self._encoder.encode(message)))

    def _abort(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._write(Abort(request_id))

    def _abort_threadsafe(self, request_id: str) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort, request_id)

    def _stream(self, request_id: str) -> OutputStream | None:
        reference = self._streams.get(request_id)
        return None if reference is None else reference()

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Output():
                if message.handle is not None and self.on_lease_opened is not None:
                    self.on_lease_opened(message.handle)
                if (stream := self._stream(message.request_id)) is not None:
                    stream.take(message)
                    if stream.ended:
                        del self._streams[message.request_id]
            case Failed():
                if (stream := self._stream(message.request_id)) is not None:
                    del self._streams[message.request_id]
                    stream.end(_error_of(message))
            case Stats():
                self.stats = message
            case Events():
                for event_stream in list(self._event_streams):
                    event_stream.take(message)
            case HandoffFetched():
                if self.on_handoff_fetched is not None:
                    self.on_handoff_fetched(message)
            case HandoffProgress():
                if (reader := self._readers.get(message.handoff_id)) is not None:
                    reader.take(message)
            case HandoffWanted():
                if self.on_handoff_wanted is not None:
                    self.on_handoff_wanted(message)
            case Feed():
                self.feeds.take(message)
            case Ready():
                self._ready.set_result(message)
            case Loading():
                log.info("engine %d: %s %d %%", self.pid, message.stage, round(100 * message.done))
            case Fatal():
                self._fatal = message
                log.error("engine %d: %s", self.pid, message.message)
                self._died()


def _error_of(failed: Failed) -> ServingError:
    return SERVING_ERRORS.get(failed.code, InternalError)(failed.message, param=failed.param)


def _environment(config: EngineConfig) -> dict[str, str]:
    """The parent's, with its import path. OpenMP reads its thread count before torch can be told."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if config.cpu_threads:
        environment["OMP_NUM_THREADS"] = str(config.cpu_threads)
    # Threads that wait for the next product spin for microseconds, then sleep: other workers have the cores meanwhile.
    environment.setdefault("GOMP_SPINCOUNT", "10000")
    environment.setdefault("KMP_BLOCKTIME", "1")  # ms
    return environment
