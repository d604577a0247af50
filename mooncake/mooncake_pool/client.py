"""The vendor's store client, made safe to hold. The only module that imports the vendor's package `mooncake`.

What the wrapper rules out: calls before setup or after close (segfault), Redis metadata (abort of the process), RDMA
without a device (silently TCP), setup without a master (90 s with the GIL held), closing against a dead master (20 s).
A vendor crash cannot be caught: run this in a process that may die.
"""

from __future__ import annotations

import enum
import importlib
import os
import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from kvstore.protocol import split_address
from mooncake_pool.lending import LentMemory

MIN_SEGMENT_BYTES = 16 * 1024 * 1024
_FORBIDDEN_IN_KEYS = frozenset(",&?\n\r\0")


class StoreUnavailable(Exception):
    """The store client cannot be had; the message says why and what to do."""


class Outcome(enum.IntEnum):
    """What became of one key of a call."""

    OK = 0
    MISS = 1  # not there, not readable yet, or its lease ran out under the read
    NO_SPACE = 2
    TRANSFER_FAILED = 3
    MASTER_GONE = 4
    REFUSED = 5  # any other negative code
    PRESENT = 6  # of a reservation: the key is there already, or another client is writing it


_BY_CODE = {
    -200: Outcome.NO_SPACE,
    -703: Outcome.MISS,
    -704: Outcome.MISS,
    -705: Outcome.PRESENT,
    -707: Outcome.MISS,
    -800: Outcome.TRANSFER_FAILED,
    -801: Outcome.TRANSFER_FAILED,
    -900: Outcome.MASTER_GONE,
    -901: Outcome.MASTER_GONE,
}


def outcome_of(code: int) -> Outcome:
    if code >= 0:
        return Outcome.OK
    if -1012 <= code <= -1000:  # no leader, or this master serves nothing now
        return Outcome.MASTER_GONE
    return _BY_CODE.get(code, Outcome.REFUSED)


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a stored value lies."""

    endpoint: str  # host:port of its holder's transfer engine
    address: int  # in the holder's process
    size: int  # bytes


class StoreSettings(msgspec.Struct, frozen=True):
    master_address: str  # host:port
    local_hostname: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"  # tcp | rdma
    devices: str = ""  # rdma: comma-joined HCA names
    segment_size: int = 0  # bytes lent to the pool; 0 or at least 16 MiB
    connect_timeout: float = 5.0  # seconds for the TCP connect that comes before setup

    def check(self) -> None:
        """StoreUnavailable for what the vendor's setup answers with an abort, a hang or a bare -600."""
        if self.metadata_server.startswith("redis"):
            raise StoreUnavailable(
                f"metadata_server: {self.metadata_server!r} is not compiled into the Mooncake wheels and would abort "
                "the process; use P2PHANDSHAKE, http:// or etcd://"
            )
        if self.protocol not in ("tcp", "rdma"):
            raise StoreUnavailable(f"protocol: {self.protocol!r} is not one of tcp, rdma")
        if self.segment_size and self.segment_size < MIN_SEGMENT_BYTES:
            raise StoreUnavailable(f"segment_size: {self.segment_size} is neither 0 nor at least {MIN_SEGMENT_BYTES}")
        try:
            split_address(self.master_address)
        except ValueError as error:
            raise StoreUnavailable(f"master_server_address: {error}") from None


def load_vendor(protocol: str) -> Any:
    """Module mooncake.store. Its environment is read once, at import, so it is set here first."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    if protocol == "rdma":
        os.environ["MC_FORCE_HCA"] = "1"  # else a host without a device uses TCP and says nothing
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise StoreUnavailable(
            f"mooncake.store cannot be imported ({error}); install the extra `cpu` (GPU hosts: `cu12` or `cu13`) and, "
            "on Debian or Ubuntu, `apt-get install libibverbs1`"
        ) from None


class StoreHandle:
    """One set-up store client. Made by `open`; after `close` every call raises StoreUnavailable."""

    def __init__(self, store: Any, lent: LentMemory | None = None) -> None:
        self._store: Any | None = store
        self.lent = lent
        """The segment's memory where other processes of this host can map it."""

    @classmethod
    def open(cls, settings: StoreSettings) -> StoreHandle:
        """Connects and lends the segment. Holds the GIL up to about 5 s when the master goes away meanwhile."""
        settings.check()
        try:
            socket.create_connection(split_address(settings.master_address), settings.connect_timeout).close()
        except OSError as error:
            raise StoreUnavailable(f"no master at {settings.master_address}: {error}") from None
        store = load_vendor(settings.protocol).MooncakeDistributedStore()
        # Over RDMA the vendor allocates the segment itself: only TCP mounts of shared memory are proven.
        shared = settings.segment_size if settings.protocol == "tcp" else 0
        code = store.setup(
            settings.local_hostname,
            settings.metadata_server,
            settings.segment_size - shared,
            0,  # local buffer: only calls that copy through it need one
            settings.protocol,
            settings.devices,
            settings.master_address,
        )
        if code != 0:
            raise StoreUnavailable(
                f"setup over {settings.protocol} with master {settings.master_address} gave {code}"
                + ("; is an RDMA device active on this host?" if settings.protocol == "rdma" else "")
            )
        return cls(store, _lend(store, shared) if shared else None)

    def _live(self) -> Any:
        if self._store is None:
            raise StoreUnavailable("the store client is closed")
        return self._store

    def segment_name(self) -> str:
        """host:port by which the pool knows this client's segment."""
        return str(self._live().get_hostname())

    def register(self, address: int, length: int) -> None:
        code = self._live().register_buffer(address, length)
        if code != 0:
            raise StoreUnavailable(f"register_buffer of {length} bytes gave {code}")

    def contains(self, keys: Sequence[str]) -> list[Outcome]:
        """OK or MISS for each key, or why it is not known."""
        codes = self._live().batch_is_exist(_checked(keys))
        return [Outcome.OK if code == 1 else Outcome.MISS if code == 0 else outcome_of(code) for code in codes]

    def get_into(self, keys: Sequence[str], addresses: Sequence[int], size: int) -> list[tuple[Outcome, int]]:
        """Reads each value to its address (room for `size` bytes); with each outcome the bytes received."""
        codes = self._live().batch_get_into(_checked(keys), list(addresses), [size] * len(keys))
        return [(outcome_of(code), max(0, code)) for code in codes]

    def put_from(self, keys: Sequence[str], addresses: Sequence[int], size: int) -> list[Outcome]:
        """Stores `size` bytes from each address. A key that exists keeps its old bytes and is OK."""
        codes = self._live().batch_put_from(_checked(keys), list(addresses), [size] * len(keys))
        return [outcome_of(code) for code in codes]

    def reserve(self, keys: Sequence[str], size: int) -> tuple[list[Outcome], list[Place | None]]:
        """Makes room for `size` bytes under each key that is not there yet, for the caller to fill in place.

        The keys are readable from here on, whatever the memory holds: values must prove themselves to their readers.
        The master evicts none of them before its lease time is over.
        """
        store = self._live()
        outcomes = [outcome_of(code) for code in store.batch_put_session_start(_checked(keys), [size] * len(keys))]
        begun = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        places: list[Place | None] = [None] * len(keys)
        if begun:
            names = [keys[i] for i in begun]
            for i, code in zip(begun, store.batch_put_session_end(names), strict=True):
                outcomes[i] = outcome_of(code)
            for i, place in zip(begun, self.locate(names), strict=True):
                places[i] = place
                if place is None and outcomes[i] is Outcome.OK:
                    outcomes[i] = Outcome.MISS
        return outcomes, places

    def locate(self, keys: Sequence[str]) -> list[Place | None]:
        """Where the value of each key lies; the master evicts none of those before its lease time is over."""
        found = self._live().batch_get_replica_desc(_checked(keys))
        return [_first_place(found.get(key, ())) for key in keys]

    def remove(self, keys: Sequence[str]) -> None:
        """Forgets keys, leased or not."""
        self._live().batch_remove(_checked(keys), True)

    def master_answers(self) -> bool:
        """By the client's own heartbeat of once a second; no call is made."""
        return bool(self._live().health_check() == 0)

    def close(self) -> bool:
        """Unmounts the segment; takes 1-3 s and holds the GIL. False when there was no master to tell.

        In that case the vendor's object is left alone, and the process must end by os._exit.
        """
        store, self._store = self._store, None
        if store is None:
            return True
        if store.health_check() != 0:
            _ABANDONED.append(store)
            return False
        store.close()
        return True


def _lend(store: Any, size: int) -> LentMemory:
    lent = LentMemory(size)
    answer = store.mount_segment(lent.path, size, 0, "tcp", "")
    if answer["ret"] != 0:
        raise StoreUnavailable(f"mount_segment of {size} bytes gave {answer['ret']}")
    lent.find_mapping()
    return lent


def _first_place(replicas: Sequence[Any]) -> Place | None:
    for replica in replicas:
        if replica.is_memory_replica():
            buffer = replica.get_memory_descriptor().buffer_descriptor
            return Place(buffer.transport_endpoint, buffer.buffer_address, buffer.size)
    return None


_ABANDONED: list[Any] = []
"""Clients whose destructor would wait for a dead master."""


def _checked(keys: Sequence[str]) -> list[str]:
    for key in keys:
        if not key or not _FORBIDDEN_IN_KEYS.isdisjoint(key):
            raise ValueError(f"store key {key!r}: empty, or has a comma, '&', '?' or a line break")
    return list(keys)
