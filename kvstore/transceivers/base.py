"""What moves KV blocks, seen by the engine.

Two kinds of sources. A `Transceiver` reads the pages of one other worker, as a handle names them; a `BlockStore` is
addressed by block key. Pages are always *read* by their new owner and never written by anybody else: a page that gets
another owner can then be told from its generation, and no late message can change one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.errors import TransferError
from kvstore.handoff import Handle, RemoteMemory


class Pages(Protocol):
    """The bytes behind the block numbers of this worker (kvstore.transceivers.shm.SharedPool)."""

    block_bytes: int
    num_blocks: int

    @property
    def address(self) -> int:
        """Of the whole mapping: header, generations, blocks."""

    @property
    def size(self) -> int: ...

    def offset(self, block: int) -> int:
        """Of a block in the mapping."""

    def block(self, block: int) -> memoryview: ...


class Transceiver(Protocol):
    """One way from worker to worker. Every worker that offers by it can also fetch by it.

    `holding(True)` from the first open offer to the end of the last one: the time in which others may come to read.
    """

    name: str
    batch: int
    """Blocks to ask for at once: `over` is looked at and bytes are verified between two batches at the latest."""

    def descriptor(self) -> RemoteMemory | None:
        """What a handle carries for this way. None: the handle's `shared_memory` says it all."""

    def reaches(self, handle: Handle) -> bool:
        """Whether the handle's pages can be read this way."""

    def fetch(
        self, handle: Handle, ids: Sequence[int], generations: Sequence[int], blocks: Sequence[int], over: OverCheck
    ) -> None:
        """Copies pages `ids` of the handle's worker into `blocks` of this one, and returns when all are here and were
        verified. TransferError: `blocks` hold anything. Unsettled: they may still be written to, until it says so.
        StaleBlock: a page has another owner. `over` is asked often; once it is true, no more than that is done.
        """

    def holding(self, open_offers: bool) -> None: ...

    def close(self) -> None: ...


OverCheck = Callable[[], bool]
"""True when nobody wants the result any more: cancelled, or the deadline has passed."""


class Unsettled(TransferError):
    """Given up, but the transport cannot take it back: its bytes may still come. `then(callback)` calls once they have
    come, or never can; from whatever thread finds out, at once if that is known already."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self._lock = threading.Lock()
        self._settled = False
        self._callbacks: list[Callable[[], None]] = []

    def then(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._settled:
                self._callbacks.append(callback)
                return
        callback()

    def settle(self) -> None:
        with self._lock:
            self._settled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class BlockStore(Protocol):
    """A cache of full blocks outside the engine. It promises nothing: trouble of any kind is a miss.

    All calls block, end within `timeout` seconds, may come from several threads at once, and never raise.
    """

    def contains(self, keys: Sequence[bytes], timeout: float) -> int:
        """Length of the leading run of `keys` that is present."""

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout: float) -> int:
        """Length of the leading run loaded and verified. Buffers behind that run may hold anything."""

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview], timeout: float) -> int:
        """How many are stored afterwards; the ones that were there before count."""

    def state(self) -> str:
        """ "up" or "degraded: <reason>"."""

    def close(self) -> None: ...
