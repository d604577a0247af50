"""One worker's record in the registry, kept there by a thread of its own.

A thread, because an event loop that is busy with a long request must not cost the worker its membership.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from kvstore.protocol import WorkerRecord

logger = logging.getLogger(__name__)

_FIRST_RETRY = 0.05  # seconds
_LAST_RETRY = 1.0
_FIRST_ATTEMPT = "retrying: first attempt"


class RegistryUnavailable(Exception):
    """The registry did not do what it was asked; the message is the reason."""


class RecordWriter(Protocol):
    """One record in one registry, used by one thread. Each call is bounded in time and raises RegistryUnavailable."""

    def write(self) -> None: ...

    def refresh(self) -> bool:
        """Starts the record's time to live anew. False: there is no such record."""
        ...

    def remove(self) -> None: ...

    def close(self) -> None: ...


class Registration:
    """`state` is "registered", "retrying: <reason>" or "stopped". Start once, stop once."""

    def __init__(self, writer: RecordWriter, record: WorkerRecord, heartbeat_interval: float) -> None:
        self.record = record
        self.registrations = 0  # times the record was written: above 1, the registry had lost it
        self._writer = writer
        self._interval = heartbeat_interval
        self._state = "stopped"
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"registry {record.worker_id}", daemon=True)

    def __repr__(self) -> str:
        return f"<Registration {self.record.worker_id} {self._state} registrations={self.registrations}>"

    @property
    def state(self) -> str:
        return self._state

    def start(self) -> None:
        """Returns at once; the thread registers, and goes on trying for as long as it takes."""
        self._state = _FIRST_ATTEMPT
        self._thread.start()

    def stop(self, timeout: float = 3.0) -> None:
        """Removes the record, then ends the thread. Returns within `timeout` seconds even with the registry down, in
        which case the record runs out by itself. Blocks: an event loop calls it through a thread. Idempotent."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                logger.warning("registry: no answer; %s is left to run out", self.record.worker_id)
        self._state = "stopped"

    def _run(self) -> None:
        known = False  # the registry has, or may have, the record
        retry = _FIRST_RETRY
        while not self._ending.is_set():
            try:
                if not known or not self._writer.refresh():
                    known = True  # even a failed write may have arrived
                    self._writer.write()
                    self.registrations += 1
                self._became("registered")
                retry, delay = _FIRST_RETRY, self._interval
            except RegistryUnavailable as error:
                self._became(f"retrying: {error}")
                delay, retry = retry, min(2 * retry, _LAST_RETRY)
            self._ending.wait(delay)
        try:
            if known:
                self._writer.remove()
        except RegistryUnavailable as error:
            logger.warning("registry: %s is left to run out: %s", self.record.worker_id, error)
        finally:
            self._writer.close()

    def _became(self, state: str) -> None:
        """Logs changes between up and down, not attempts."""
        before, self._state = self._state, state
        if state == "registered" != before:
            logger.info("registry: registered %s (time %d)", self.record.worker_id, self.registrations)
        elif state != "registered" and before in ("registered", _FIRST_ATTEMPT):
            logger.warning("registry: %s is not registered, %s", self.record.worker_id, state)
