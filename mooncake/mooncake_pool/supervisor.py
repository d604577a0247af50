"""Keeps one agent process alive for an engine: finds the master, starts the agent, watches both, starts again.

    find master ─► start agent ─► set up ─► serving ──┐
        ▲                                  │  ▲       │ master's connection closes: degraded until it is back
        │                                  │  └───────┘ and the store client has found it again
        └── pause ◄── agent died, hung, or did not recover; the master moved

One thread, for ever, until `stop`. What it knows is published as (link, reason): usable when reason is None.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mooncake_pool.link import AgentLink
from mooncake_pool.manifest import Manifest, manifest_of_reference, resolve_pool

log = logging.getLogger("mooncake_pool")

CALM_SECONDS = 1.0
"""Between two looks at agent and master while all is well; TENSE_SECONDS while something is amiss."""
TENSE_SECONDS = 0.25


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    start: float = 30.0  # for an agent to set up its store client
    silence: float = 10.0  # of the agent's main thread
    stuck: float = 15.0  # for a call that nobody waits for any more
    recover: float = 10.0  # for the store client to find a master that is back
    close: float = 8.0  # for the agent to unmount
    linger: float = 20.0  # for which the blocks of an engine that died can still be read
    first_pause: float = 0.2
    longest_pause: float = 10.0
    steady: float = 30.0  # a life longer than this resets the pause


class _LifeOver(Exception):
    """This agent's life ends here; the message is what state() says meanwhile."""


class Supervisor:
    def __init__(
        self,
        pool: str,
        master_timeout: float,
        start_agent: Callable[[Manifest], AgentLink],
        publish: Callable[[AgentLink | None, str | None], None],
        limits: Limits,
    ) -> None:
        """`start_agent` starts a process for the manifest given; `publish` is called from the thread."""
        self._pool = pool
        self._master_timeout = master_timeout
        self._start_agent = start_agent
        self._publish = publish
        self._limits = limits
        self._stop = threading.Event()
        self._wake, self._wake_end = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="mooncake-pool", daemon=True)
        self._trouble: str | None = None  # what ended the last life, until a pool is usable again
        self.lives = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends thread and agent; unmounts the segment when the master is there to be told."""
        if not self._stop.is_set():
            self._stop.set()
            self._wake.send(b"x")
        self._thread.join()
        self._publish(None, "closed")
        self._wake.close()
        self._wake_end.close()

    def _run(self) -> None:
        pause = self._limits.first_pause
        while not self._stop.is_set():
            born = time.monotonic()
            try:
                self._live()
            except _LifeOver as over:
                self._trouble = str(over)
            except Exception as error:  # the pool is only a cache: no fault of it may end supervision
                log.exception("pool supervision failed")
                self._trouble = f"supervision failed: {error}"
            else:
                return
            if time.monotonic() - born > self._limits.steady:
                pause = self._limits.first_pause
            self._publish(None, self._trouble)
            self._stop.wait(pause)
            pause = min(2 * pause, self._limits.longest_pause)

    def _live(self) -> None:
        """One agent from start to end. Returns only when stopping."""
        manifest = self._find_master()
        if manifest is None:
            return
        try:
            link = self._start_agent(manifest)
        except OSError as error:
            raise _LifeOver(f"the store agent could not be started: {error}") from None
        self.lives += 1
        clean = False
        try:
            self._await_ready(link)
            clean = self._serve(link, manifest)
        finally:
            self._publish(None, "closed" if self._stop.is_set() else self._trouble or "the store agent has ended")
            if clean:
                link.close(self._limits.close)
            else:
                link.kill()

    def _find_master(self) -> Manifest | None:
        """Waits up to master_timeout for a manifest and for its master to accept a connection. None when stopping."""
        self._publish(None, self._trouble or "waiting for manifest and master")
        deadline = time.monotonic() + self._master_timeout
        while not self._stop.is_set():
            try:
                manifest = resolve_pool(self._pool, max(0.0, deadline - time.monotonic()), self._stop)
            except TimeoutError as error:
                if self._stop.is_set():
                    break
                raise _LifeOver(str(error)) from None
            connection = _connect(manifest)
            if connection is not None:
                connection.close()
                return manifest
            if time.monotonic() >= deadline:
                raise _LifeOver(f"no master at {manifest.master_server_address} after {self._master_timeout:g} s")
            self._stop.wait(TENSE_SECONDS)
        return None

    def _await_ready(self, link: AgentLink) -> None:
        self._publish(None, self._trouble or "the store agent is starting")
        deadline = time.monotonic() + self._limits.start
        while link.ready is None and not self._stop.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                raise _LifeOver(f"the store agent was not ready after {self._limits.start:g} s")
            readable, _, _ = select.select([link.sock, self._wake_end], [], [], left)
            if link.sock in readable and not link.pump():
                raise _LifeOver(link.failure or _obituary(link))

    def _serve(self, link: AgentLink, manifest: Manifest) -> bool:
        """Until stopping; True when the master is there, so that closing makes sense. Raises _LifeOver."""
        with _MasterWatch(self._pool, manifest) as master:
            while not self._stop.is_set():
                reason = self._assess(link, master)
                if reason is None:
                    self._trouble = None
                self._publish(link, reason)
                sources = [link.sock, self._wake_end, *master.sockets()]
                readable, _, _ = select.select(sources, [], [], CALM_SECONDS if reason is None else TENSE_SECONDS)
                if link.sock in readable and not link.pump():
                    raise _LifeOver(_obituary(link))
                if master.lost(readable):
                    link.master_answers = False
                    self._publish(link, master.complaint())
                    link.write_off_calls()
            return master.present and link.master_answers

    def _assess(self, link: AgentLink, master: _MasterWatch) -> str | None:
        """Why the pool cannot be used now, or None. Raises _LifeOver when waiting on is of no use."""
        limits = self._limits
        if link.silent_for() > limits.silence:
            raise _LifeOver(f"the store agent did not answer for {limits.silence:g} s")
        if link.stuck_for() > limits.stuck:
            raise _LifeOver(f"the store agent was stuck in a call for {limits.stuck:g} s")
        link.ask_state(CALM_SECONDS if master.present and link.master_answers else TENSE_SECONDS)
        if not master.present and not master.reconnect():
            if master.moved():
                raise _LifeOver("the master has moved")
            return master.complaint()
        if link.master_answers:
            master.settled()
            return None
        if master.unsettled_for() > limits.recover:
            raise _LifeOver(f"the store client did not find the master again in {limits.recover:g} s")
        return f"the store client has lost the master at {master.address}"


class _MasterWatch:
    """An idle TCP connection to the master: the kernel tells at once when the master's process ends."""

    RESOLVE_SECONDS = 2.0

    def __init__(self, pool: str, manifest: Manifest) -> None:
        self._pool = pool
        self._manifest = manifest
        self._socket: socket.socket | None = None
        self._unsettled: float | None = None
        self._looked = time.monotonic()
        self.reconnect()

    def __enter__(self) -> _MasterWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    @property
    def address(self) -> str:
        return self._manifest.master_server_address

    @property
    def present(self) -> bool:
        return self._socket is not None

    def complaint(self) -> str:
        return f"no master at {self.address}"

    def sockets(self) -> list[socket.socket]:
        return [self._socket] if self._socket else []

    def lost(self, readable: list[socket.socket]) -> bool:
        """True when the connection has just ended."""
        if self._socket is None or self._socket not in readable:
            return False
        with contextlib.suppress(OSError):
            if self._socket.recv(64):
                return False
        self._drop()
        return True

    def reconnect(self) -> bool:
        self._socket = _connect(self._manifest)
        self._unsettled = time.monotonic()
        return self.present

    def settled(self) -> None:
        self._unsettled = None

    def unsettled_for(self) -> float:
        """Seconds for which the master has been there but the store client has not agreed."""
        if self._unsettled is None:
            self._unsettled = time.monotonic()
        return time.monotonic() - self._unsettled

    def moved(self) -> bool:
        """True when the manifest names another master; looked up every few seconds."""
        if time.monotonic() - self._looked < self.RESOLVE_SECONDS:
            return False
        self._looked = time.monotonic()
        with contextlib.suppress(OSError, ValueError):
            return manifest_of_reference(self._pool).master_server_address != self.address
        return False

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _connect(manifest: Manifest) -> socket.socket | None:
    try:
        connection = socket.create_connection(manifest.master, 0.5)
    except OSError:
        return None
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection


def _obituary(link: AgentLink) -> str:
    try:
        ending = f"ended with code {link.process.wait(2.0)}"
    except subprocess.TimeoutExpired:
        ending = "closed its socket"
    return f"the store agent {ending}: {link.last_words() or 'it printed nothing'}"
