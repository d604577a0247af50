"""One agent process as its engine sees it: the process, the socket, the staging slots and the calls under way.

A link lives as long as its process; staging memory is never handed to a second agent, so a late write of a dying
agent reaches nobody.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import mooncake_pool
from mooncake_pool import segments, wire
from mooncake_pool.activity import ActivityLog
from mooncake_pool.client import Outcome
from mooncake_pool.staging import StagingArea

SEND_TIMEOUT = 2.0
LOG_LINES_QUOTED = 5
_CHATTER = re.compile("Logging before InitGoogleLogging|Local segment descriptor not found")
"""What the vendor prints at every start."""


class Lane(enum.StrEnum):
    """The two threads of an agent; each has half of the slots."""

    READ = "read"
    WRITE = "write"


class Call:
    __slots__ = ("abandoned_at", "done", "lane", "number", "reply", "slots")

    def __init__(self, lane: Lane, number: int, slots: list[int]) -> None:
        self.lane = lane
        self.number = number
        self.slots = slots
        self.reply: wire.Reply | None = None
        self.done = False
        self.abandoned_at: float | None = None


class Slots:
    """Slot numbers that a caller holds; `lent` while the agent may still touch them."""

    __slots__ = ("lent", "numbers")

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.lent = False

    def __len__(self) -> int:
        return len(self.numbers)


class AgentLink:
    """Spawned by `start`. `pump` and `kill`/`close` belong to one supervising thread, `call` to any thread."""

    def __init__(
        self, process: subprocess.Popen[bytes], sock: socket.socket, staging: StagingArea, log: IO[bytes]
    ) -> None:
        self.process = process
        self.sock = sock
        self.staging = staging
        self.ready: wire.Ready | None = None
        self.failure: str | None = None
        self.master_answers = True
        self.activity = ActivityLog()
        self._log = log
        self._log_start = log.seek(0, os.SEEK_END)
        self._frames = wire.FrameReader()
        self._send_lock = threading.Lock()
        self._changed = threading.Condition()
        self._calls: dict[int, Call] = {}
        self._next_call = 0
        self._dead = False
        self._overdue = dict.fromkeys(Lane, 0)
        self._state_asked: float | None = None
        self._state_last = 0.0
        half = staging.slots // 2
        self._free = {Lane.READ: list(range(half)), Lane.WRITE: list(range(half, staging.slots))}

    @classmethod
    def start(
        cls, make_request: Callable[[StagingArea], wire.Open], value_bytes: int, slots: int, log_path: Path | None
    ) -> AgentLink:
        """Starts the process and sends it its Open. OSError when it cannot be started."""
        log = _log_file(log_path)
        staging = StagingArea.create(value_bytes, slots)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "mooncake_pool.agent", "--fd", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(), staging.fd),
                    start_new_session=True,
                    env=_environment(),
                )
        except BaseException:
            ours.close()
            log.close()
            staging.close_fd()
            raise
        ours.settimeout(SEND_TIMEOUT)
        link = cls(process, ours, staging, log)
        link._send(make_request(staging))
        staging.close_fd()
        return link

    # ---------------------------------------------------------------- calls, from any thread

    @contextlib.contextmanager
    def slots(self, lane: Lane, want: int, deadline: float) -> Iterator[Slots]:
        """Up to `want` slots of the lane, at least one unless time runs out or the agent dies (then none)."""
        with self._changed:
            while not self._free[lane] and not self._dead:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            taken = [] if self._dead else self._free[lane][:want]
            del self._free[lane][: len(taken)]
        held = Slots(taken)
        try:
            yield held
        finally:
            if not held.lent:
                self._give_back(lane, held.numbers)

    def call(
        self, lane: Lane, make: Callable[[int], wire.ToAgent], deadline: float, held: Slots | None = None
    ) -> wire.Reply | None:
        """Sends and waits. None when the agent is late, dead or was written off; `held` then stays with the agent."""
        call = self.begin(lane, make, held)
        return None if call is None else self.finish(call, deadline, held)

    def begin(self, lane: Lane, make: Callable[[int], wire.ToAgent], held: Slots | None = None) -> Call | None:
        """Sends without waiting; None when the agent is dead. `finish` may be left out for a call without slots."""
        with self._changed:
            if self._dead:
                return None
            call = Call(lane, self._next_call, held.numbers if held else [])
            self._next_call += 1
            self._calls[call.number] = call
        if held:
            held.lent = True
        self._send(make(call.number))
        return call

    def finish(self, call: Call, deadline: float, held: Slots | None = None) -> wire.Reply | None:
        """Waits for the answer. As `call`."""
        with self._changed:
            while not call.done:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._abandon(call)
                    break
                self._changed.wait(left)
            if held and call.reply is not None:
                held.lent = False
            return call.reply

    def tell(self, message: wire.ToAgent) -> None:
        """Sends what has no answer."""
        self._send(message)

    def overdue(self, lane: Lane) -> bool:
        """True while the lane works on a call that nobody waits for any more."""
        return self._overdue[lane] > 0

    def stuck_for(self) -> float:
        """Seconds since the oldest abandoned call that is still unanswered was abandoned."""
        with self._changed:
            times = [call.abandoned_at for call in self._calls.values() if call.abandoned_at is not None]
        return time.monotonic() - min(times) if times else 0.0

    def write_off_calls(self) -> None:
        """Lets every waiting caller go without an answer."""
        with self._changed:
            for call in self._calls.values():
                if not call.done:
                    self._abandon(call)

    def _abandon(self, call: Call) -> None:
        call.done, call.abandoned_at = True, time.monotonic()
        self._overdue[call.lane] += 1
        self._changed.notify_all()

    def _give_back(self, lane: Lane, numbers: Sequence[int]) -> None:
        with self._changed:
            self._free[lane].extend(numbers)
            self._changed.notify_all()

    def _send(self, message: wire.ToAgent) -> None:
        """A send that fails or stalls ends the agent: half a frame cannot be taken back."""
        try:
            with self._send_lock:
                self.sock.sendall(wire.frame(message))
        except OSError:
            self._mark_dead()
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)  # wakes the supervisor

    # ---------------------------------------------------------------- supervision, from one thread

    def pump(self) -> bool:
        """Takes in what the agent sent. False at the end of its life."""
        try:
            data = self.sock.recv(65536)
        except (BlockingIOError, TimeoutError):
            return True
        except OSError:
            data = b""
        if not data:
            self._mark_dead()
            return False
        for body in self._frames.feed(data):
            self._take(wire.from_agent.decode(body))
        return True

    def _take(self, message: wire.FromAgent) -> None:
        match message:
            case wire.Ready():
                self.ready = message
            case wire.Failed():
                self.failure = message.reason
            case wire.StateReply():
                self._state_asked = None
                self.master_answers = message.master_answers
            case wire.Reply():
                self._finish(message)

    def _finish(self, reply: wire.Reply) -> None:
        if Outcome.MASTER_GONE in reply.outcomes:
            self.master_answers = False
        with self._changed:
            call = self._calls.pop(reply.call)
            if call.abandoned_at is not None:
                self._overdue[call.lane] -= 1
                self._free[call.lane].extend(call.slots)
            else:
                call.reply, call.done = reply, True
            self._changed.notify_all()

    def ask_state(self, interval: float) -> None:
        """Sends State and what was done so far, unless one is unanswered or less than `interval` seconds old."""
        now = time.monotonic()
        if self._state_asked is None and now - self._state_last >= interval:
            self._state_asked = self._state_last = now
            self._send(wire.State(0, self.activity.snapshot()))

    def silent_for(self) -> float:
        """Seconds since an unanswered State was sent; 0 when none is."""
        return 0.0 if self._state_asked is None else time.monotonic() - self._state_asked

    def _mark_dead(self) -> None:
        with self._changed:
            self._dead = True
            for call in self._calls.values():
                call.done = True
            self._calls.clear()
            self._overdue = dict.fromkeys(Lane, 0)
            self._changed.notify_all()

    def last_words(self) -> str:
        """End of what the agent printed, for the message about its death."""
        try:
            with open(f"/proc/self/fd/{self._log.fileno()}", "rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 4096))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return " | ".join([line for line in lines if not _CHATTER.search(line)][-LOG_LINES_QUOTED:])

    def close(self, timeout: float) -> None:
        """Asks the agent to unmount and end, kills it after `timeout` seconds, and forgets everything."""
        self._mark_dead()
        with contextlib.suppress(OSError), self._send_lock:
            self.sock.sendall(wire.frame(wire.Close()))
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def kill(self) -> None:
        """SIGKILL; the record says that the segment was lost. Safe when the process has ended already."""
        self._mark_dead()
        self.process.kill()
        self.process.wait()
        self.sock.close()
        self._log.close()
        if self.ready is not None and self.ready.record is not None:
            with contextlib.suppress(OSError):
                segments.mark_stopped(Path(self.ready.record), "lost", self.activity.snapshot())


def _log_file(path: Path | None) -> IO[bytes]:
    if path is None:
        return tempfile.TemporaryFile()
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "ab+")


def _environment() -> dict[str, str]:
    """The agent finds this package even where it is on sys.path by other means than an installation."""
    parent = Path(mooncake_pool.__file__).resolve().parent.parent
    paths = [str(parent), str(parent.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
