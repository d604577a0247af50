"""Segments of the pool that lie in the memory of this host, mapped into this process.

`SegmentMaps` finds the holder that a block's descriptor names. What it gives is raw memory of the pool: a value in it
may change at any time, and proves itself by its trailer.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable

from kvstore.protocol import split_address
from mooncake_pool.client import Place
from mooncake_pool.lending import MAGIC, OFFER, address_of, lender_name, populate
from mooncake_pool.net import is_local_address

CONNECT_SECONDS = 0.5
MASTER_FORGETS = 11.0
"""Seconds after which the master has forgotten a client that is gone (client_ttl, and its own tick)."""


class SegmentMap:
    """One holder's memory, for as long as somebody holds this object."""

    def __init__(self, connection: socket.socket, memory: mmap.mmap, base: int) -> None:
        connection.setblocking(False)
        self._connection = connection
        self.memory = memory
        self._view = memoryview(memory)
        self._base = base
        self.gone_at: float | None = None

    def value(self, place: Place) -> memoryview | None:
        """The memory of a stored value; None for a place that is not in this segment."""
        start = place.address - self._base
        if start < 0 or place.size < 0 or start + place.size > len(self._view):
            return None
        return self._view[start : start + place.size]

    def holder_lives(self) -> bool:
        if self.gone_at is None:
            try:
                alive = self._connection.recv(1) != b""
            except BlockingIOError:
                alive = True
            except OSError:
                alive = False
            if not alive:
                self.gone_at = time.monotonic()
        return self.gone_at is None

    def let_go(self) -> None:
        """The memory itself stays while values of it are held."""
        self._connection.close()


class SegmentMaps:
    """Segments by the endpoint in a descriptor. Safe from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._maps: dict[str, SegmentMap] = {}
        self._absent: dict[str, float] = {}  # endpoint: when to look again
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def find(self, endpoint: str, to_write: bool = False) -> SegmentMap | None:
        """None for a holder on another host, one that does not lend its memory, or one that is gone.

        Memory of a holder that has just gone still has its values: they can be read until the master forgets them.
        """
        with self._lock:
            if self._stop.is_set():
                return None
            found = self._maps.get(endpoint)
            if found is not None and found.holder_lives():
                return found
            opened = self._open(endpoint)
            if opened is not None:
                return opened
            self._drop_forgotten()
            return None if to_write else self._maps.get(endpoint)

    def sweep(self) -> None:
        """To be called now and then: memory of a holder that is gone stays taken while it is mapped."""
        with self._lock:
            self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        now = time.monotonic()
        for endpoint, segment in list(self._maps.items()):
            if not segment.holder_lives() and segment.gone_at is not None and now - segment.gone_at > MASTER_FORGETS:
                self._maps.pop(endpoint).let_go()

    def close(self) -> None:
        with self._lock:
            self._stop.set()
            for segment in self._maps.values():
                segment.let_go()
            self._maps.clear()
        for thread in self._threads:
            thread.join()

    def _open(self, endpoint: str) -> SegmentMap | None:
        now = self._clock()
        if now < self._absent.get(endpoint, 0.0):
            return None
        segment = connect_to_lender(endpoint)
        if segment is None:
            self._absent[endpoint] = now + MASTER_FORGETS
            return None
        self._absent.pop(endpoint, None)
        replaced = self._maps.pop(endpoint, None)
        if replaced is not None:
            replaced.let_go()
        self._maps[endpoint] = segment
        thread = threading.Thread(target=self._populate, args=(segment.memory,), name="map-segment", daemon=True)
        self._threads = [old for old in self._threads if old.is_alive()] + [thread]
        thread.start()
        return segment

    def _populate(self, memory: mmap.mmap) -> None:
        populate(address_of(memory), len(memory), self._stop)


def connect_to_lender(endpoint: str) -> SegmentMap | None:
    """The segment whose holder listens at `endpoint` of this host, if it lends its memory to this process."""
    try:
        host, port = split_address(endpoint)
    except ValueError:
        return None
    if not is_local_address(host):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_SECONDS)
    segment = None
    try:
        connection.connect(lender_name(port))
        segment = _take_offer(connection)
    except (OSError, ValueError):
        pass
    if segment is None:
        connection.close()
    return segment


def _take_offer(connection: socket.socket) -> SegmentMap | None:
    data, descriptors, _, _ = socket.recv_fds(connection, OFFER.size, 1)
    with contextlib.ExitStack() as stack:
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        if len(data) != OFFER.size or len(descriptors) != 1:
            return None
        magic, base, size = OFFER.unpack(data)
        if magic != MAGIC:
            return None
        return SegmentMap(connection, mmap.mmap(descriptors[0], size), base)
