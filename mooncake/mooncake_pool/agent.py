"""The process that holds a rank's store client: `python -m mooncake_pool.agent --fd N`.

    main thread   reads frames; answers State at once, hands the rest to a lane
    read lane     contains, locate, get  } one thread each: the vendor's calls release the GIL, and a slow
    write lane    reserve, settle, put   } transfer of one kind does not hold up the other

Ends on Close, on SIGTERM, and a while after the engine's end of the socket has closed: what a dead engine stored can be
read for that long. Each unmounts the segment. Anything unexpected ends the process with a traceback: the engine starts
another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import msgspec

from kvstore.protocol import split_address
from mooncake_pool import segments, wire
from mooncake_pool.client import Outcome, Place, StoreHandle, StoreUnavailable
from mooncake_pool.lending import Lender
from mooncake_pool.net import is_local_address, own_listening_ports
from mooncake_pool.staging import StagingArea

EVICTION_TICK = 0.03
"""Seconds before the one retry of a put that found no space; the master frees within about 10-50 ms."""

RECORD_SECONDS = 2.0
"""Between two writes of what the engine did into the segment record."""

CRASHED = 70
LaneMessage = wire.Contains | wire.Locate | wire.Get | wire.Reserve | wire.Settle | wire.Forget | wire.Put


class Terminated(BaseException):
    """SIGTERM arrived while the main thread waited."""


class Agent:
    def __init__(self, sock: socket.socket, request: wire.Open) -> None:
        self._sock = sock
        self._request = request
        self._send_lock = threading.Lock()
        self._staging = StagingArea(request.staging_fd, request.value_bytes, request.slots)
        self._base = self._staging.address()
        self._record: Path | None = None
        self._looked_up = False
        self._lanes: dict[str, queue.SimpleQueue[LaneMessage | None]] = {}
        self._threads: list[threading.Thread] = []
        self._activity: segments.Activity | None = None
        self._recorded = 0.0
        self._record_lock = threading.Lock()
        self._reserved: dict[int, list[str]] = {}  # not settled yet, by call
        self._store = StoreHandle.open(request.store)
        self._store.register(self._base, self._staging.size)
        self._lender = Lender(self._store.lent) if self._store.lent is not None else None

    def run(self, frames: Iterator[bytes]) -> bool:
        """Serves frames until Close (True) or the end of the stream (False)."""
        name = self._store.segment_name()
        self._write_record(name)
        for lane in ("read", "write"):
            self._lanes[lane] = queue.SimpleQueue()
            thread = threading.Thread(target=self._work, args=(self._lanes[lane],), name=lane, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._send(wire.Ready(name, str(self._record) if self._record else None))
        for body in _until_lost(frames):
            message = wire.to_agent.decode(body)
            match message:
                case wire.State():
                    self._send(wire.StateReply(message.call, self._store.master_answers()))
                    self._note_activity(message.activity)
                case wire.Reserve() | wire.Settle() | wire.Forget() | wire.Put() | wire.Contains(before_put=True):
                    self._lanes["write"].put(message)
                case wire.Get() | wire.Locate() | wire.Contains():
                    self._lanes["read"].put(message)
                case _:
                    return True
        return False

    def linger(self) -> None:
        """Keeps what the dead engine stored for others, unless the master is gone too."""
        self._end_lanes()
        until = time.monotonic() + self._request.linger
        while self._store.lent is not None and time.monotonic() < until and self._store.master_answers():
            time.sleep(0.2)

    def close(self) -> None:
        """Unmounts within about 3 s, or gives up on a call or a master that does not answer."""
        clean = self._end_lanes() and self._store.close()
        if self._lender is not None:
            self._lender.close()
        if self._record is not None:
            segments.mark_stopped(self._record, "closed" if clean else "lost", self._activity)

    def _end_lanes(self) -> bool:
        """False when a lane is stuck in a call. Takes back what was reserved and not filled."""
        for lane in self._lanes.values():
            lane.put(None)
        deadline = time.monotonic() + 2.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        idle = not any(thread.is_alive() for thread in self._threads)
        if idle and self._store.master_answers():
            for names in self._reserved.values():
                self._store.remove(names)
            self._reserved.clear()
        return idle

    def _work(self, lane: queue.SimpleQueue[LaneMessage | None]) -> None:
        try:
            while (message := lane.get()) is not None:
                reply = self._answer(message)
                if reply is not None:
                    self._send(reply)
        except OSError:
            pass  # the engine is gone; the main thread sees the same and closes
        except BaseException:  # noqa: BLE001 - a lane that died silently would hang every later call
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(CRASHED)

    def _answer(self, message: LaneMessage) -> wire.Reply | None:
        match message:
            case wire.Contains():
                return wire.Reply(message.call, [int(o) for o in self._store.contains(self._names(message.keys))])
            case wire.Locate():
                places = self._store.locate(self._names(message.keys))
                outcomes = [int(Outcome.MISS if place is None else Outcome.OK) for place in places]
                return wire.Reply(message.call, outcomes, places=places)
            case wire.Get():
                addresses = [self._base + slot * self._request.slot_bytes for slot in message.slots]
                results = self._store.get_into(self._names(message.keys), addresses, self._request.value_bytes)
                return wire.Reply(message.call, [int(o) for o, _ in results], [length for _, length in results])
            case wire.Reserve():
                return self._reserve(message)
            case wire.Settle():
                self._reserved.pop(message.reservation, None)
                if message.unfilled:
                    self._store.remove(self._names(message.unfilled))
            case wire.Forget():
                self._store.remove(self._names(message.keys))
            case wire.Put():
                return self._put_staged(message)
        return None

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [f"{self._request.prefix}/{key.hex()}" for key in keys]

    def _reserve(self, message: wire.Reserve) -> wire.Reply:
        names, size = self._names(message.keys), self._request.value_bytes
        self._reserved[message.call] = names
        outcomes, places = self._store.reserve(names, size)
        full = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.NO_SPACE]
        if full:
            time.sleep(EVICTION_TICK)
            again, found = self._store.reserve([names[i] for i in full], size)
            for i, outcome, place in zip(full, again, found, strict=True):
                outcomes[i], places[i] = outcome, place
        ours = [name for name, place in zip(names, places, strict=True) if place is not None]
        self._reserved[message.call] = ours
        if ours:
            self._note_protocol(ours[0])
        return wire.Reply(message.call, [int(outcome) for outcome in outcomes], places=places)

    def _put_staged(self, message: wire.Put) -> wire.Reply:
        names = self._names(message.keys)
        outcomes = self._put(names, [self._base + slot * self._request.slot_bytes for slot in message.slots])
        places: list[Place | None] = [None] * len(names)
        stored = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        if stored:
            for i, place in zip(stored, self._store.locate([names[i] for i in stored]), strict=True):
                places[i] = place
            self._note_protocol(names[stored[0]])
        return wire.Reply(message.call, [int(outcome) for outcome in outcomes], places=places)

    def _put(self, names: list[str], addresses: list[int]) -> list[Outcome]:
        size = self._request.value_bytes
        outcomes = self._store.put_from(names, addresses, size)
        full = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.NO_SPACE]
        if full:
            time.sleep(EVICTION_TICK)
            again = self._store.put_from([names[i] for i in full], [addresses[i] for i in full], size)
            for i, outcome in zip(full, again, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _write_record(self, segment_name: str) -> None:
        request = self._request
        if request.run_dir is None:
            return
        run_dir = Path(request.run_dir)
        store = request.store
        record = segments.new_record(
            store.local_hostname,
            request.rank,
            store.segment_size,
            request.role,
            request.model_key,
            request.incarnation,
            segment_name,
            store.protocol,
            self._lender.ports if self._lender is not None else own_listening_ports(),
        )
        path = segments.record_path(run_dir, record.host, record.pid)
        try:
            segments.sweep_dead(run_dir)
            segments.write_record(path, record)
        except OSError as error:
            print(f"segment record {path} could not be written: {error}", file=sys.stderr, flush=True)
        else:
            self._record = path

    def _note_activity(self, activity: segments.Activity | None) -> None:
        if activity is None:
            return
        self._activity = activity
        now = time.monotonic()
        if now - self._recorded >= RECORD_SECONDS:
            self._recorded = now
            self._amend_record(activity=activity)

    def _amend_record(self, **changes: object) -> None:
        if self._record is None:
            return
        with self._record_lock:
            try:
                record = msgspec.structs.replace(segments.read_record(self._record), **changes)
                segments.write_record(self._record, record)
            except (OSError, ValueError) as error:
                print(f"segment record {self._record} not updated: {error}", file=sys.stderr, flush=True)

    def _note_protocol(self, name: str) -> None:
        """Asks the master, once, which transport a stored block was placed with; it tells only on its own machine."""
        if self._looked_up:
            return
        self._looked_up = True
        host, _ = split_address(self._request.store.master_address)
        if self._record is None or not is_local_address(host):
            return
        # The master takes the key as it stands; key texts have no character that a URL cannot.
        url = f"http://127.0.0.1:{self._request.metrics_port}/query_key?key={name}"
        try:
            with urllib.request.urlopen(url, timeout=0.5) as answer:
                seen = protocol_in(answer.read().decode(errors="replace"))
        except (OSError, ValueError) as error:
            print(f"transport of the pool not looked up: {error}", file=sys.stderr, flush=True)
        else:
            if seen:
                self._amend_record(protocol_seen=seen)

    def _send(self, message: wire.FromAgent) -> None:
        with self._send_lock:
            self._sock.sendall(wire.frame(message))


def protocol_in(answer: str) -> str:
    """`protocol` of the first buffer descriptor in the master's answer to /query_key; "" when there is none."""
    try:
        content = json.loads(answer)
    except ValueError:
        return ""
    stack = [content]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            for name, value in item.items():
                if name.startswith("protocol") and isinstance(value, str):
                    return value
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return ""


def _until_lost(frames: Iterator[bytes]) -> Iterator[bytes]:
    with contextlib.suppress(ConnectionError):
        yield from frames


def _terminate(_signum: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mooncake_pool.agent")
    parser.add_argument("--fd", type=int, required=True, help="socket to the engine, inherited")
    sock = socket.socket(fileno=parser.parse_args(argv).fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the engine's to handle
    agent: Agent | None = None
    try:
        signal.signal(signal.SIGTERM, _terminate)
        frames = wire.receive_frames(sock)
        first = next(frames, None)
        if first is None:
            return 0
        request = wire.to_agent.decode(first)
        if not isinstance(request, wire.Open):
            raise ValueError("the first frame is no Open")
        agent = Agent(sock, request)
        if not agent.run(frames):
            agent.linger()
    except StoreUnavailable as error:
        print(error, file=sys.stderr, flush=True)
        sock.sendall(wire.frame(wire.Failed(str(error))))
        return 1
    except (Terminated, ConnectionError):
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if agent is not None:
        agent.close()
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except BaseException:  # noqa: BLE001 - os._exit below prints nothing
        traceback.print_exc()
        status = CRASHED
    sys.stderr.flush()
    # A destructor of the vendor's would wait for a dead master, and a lane may be stuck in a call.
    os._exit(status)
