"""A block store in memory whose faults happen below the verification, where a real store's would."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Sequence

from mooncake_pool.blockstore import TRAILER_BYTES, check_call, read_value, scope_of, write_value


class Fault(enum.StrEnum):
    MISSING = "missing"  # exists says yes, the read finds nothing
    SHORT_READ = "short read"  # fewer bytes arrive than were asked for
    WRONG_LENGTH = "wrong length"  # the stored value is longer than a block of this store
    ZEROS = "zeros"  # all bytes arrive, and all are 0
    CORRUPT = "corrupt"  # one byte of the block differs
    STRANGER = "stranger"  # another key's block, sealed as such
    TIMEOUT = "timeout"  # no answer before the caller's deadline
    REFUSED = "refused"  # the connection is refused: the call has no answer
    DEAD = "dead"  # the store is gone from here on


class FakeBlockStore:
    """Implements mooncake_pool.blockstore.BlockStore. Stores that share `values` are clients of one pool."""

    def __init__(self, block_bytes: int, prefix: str = "fake", values: dict[bytes, bytes] | None = None) -> None:
        self.block_bytes = block_bytes
        self.values = {} if values is None else values  # sealed values by key
        self.calls: list[tuple[str, int]] = []  # (operation, number of keys)
        self._scope = scope_of(prefix)
        self._faults: dict[tuple[str, int | bytes | None], Fault] = {}
        self._dead = False
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def fail(self, operation: str, mode: Fault | str, block: int | bytes | None = None) -> None:
        """Fault of "get", "put" or "contains" at a position in the call, at a key, or (None) at each block."""
        self._faults[operation, block] = Fault(mode)

    def heal(self) -> None:
        self._faults.clear()
        self._dead = False

    # ---------------------------------------------------------------- BlockStore

    def contains(self, keys: Sequence[bytes], timeout: float) -> int:
        check_call(keys, None, self.block_bytes)
        deadline = self._begin("contains", keys, timeout)
        for i, key in enumerate(keys):
            fault = self._fault("contains", i, key, deadline)
            if self._dead or fault is not None or key not in self.values:
                return i
        return len(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout: float) -> int:
        check_call(keys, into, self.block_bytes)
        deadline = self._begin("get", keys, timeout)
        for i, key in enumerate(keys):
            staged = memoryview(bytearray(self.block_bytes + TRAILER_BYTES))
            received = self._read(i, key, staged, deadline)
            if received != len(staged) or not read_value(staged, into[i], key, self._scope):
                return i
        return len(keys)

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview], timeout: float) -> int:
        check_call(keys, blocks, self.block_bytes)
        deadline = self._begin("put", keys, timeout)
        stored = 0
        for i, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            fault = self._fault("put", i, key, deadline)
            if self._dead or fault in (Fault.TIMEOUT, Fault.REFUSED):
                break
            if fault is not None:
                continue
            self._write(key, block)
            stored += 1
        return stored

    def state(self) -> str:
        if self._closed.is_set():
            return "degraded: closed"
        return "degraded: the store is gone" if self._dead else "up"

    def close(self) -> None:
        self._closed.set()
        self._dead = True

    # ---------------------------------------------------------------- below the verification

    def _begin(self, operation: str, keys: Sequence[bytes], timeout: float) -> float:
        with self._lock:
            self.calls.append((operation, len(keys)))
        return time.monotonic() + timeout

    def _fault(self, operation: str, position: int, key: bytes, deadline: float) -> Fault | None:
        for place in (position, key, None):
            fault = self._faults.get((operation, place))
            if fault is not None:
                break
        if fault is Fault.TIMEOUT:
            self._closed.wait(max(0.0, deadline - time.monotonic()))
        if fault is Fault.DEAD:
            self._dead = True
        return fault

    def _write(self, key: bytes, block: memoryview) -> None:
        value = memoryview(bytearray(self.block_bytes + TRAILER_BYTES))
        write_value(value, block, key, self._scope)
        with self._lock:
            self.values.setdefault(key, bytes(value))

    def _read(self, position: int, key: bytes, staged: memoryview, deadline: float) -> int:
        """Bytes received into `staged`, as a transport would report them."""
        fault = self._fault("get", position, key, deadline)
        value = self.values.get(key)
        if self._dead or value is None or fault in (Fault.MISSING, Fault.TIMEOUT, Fault.REFUSED, Fault.DEAD):
            return 0
        match fault:
            case Fault.SHORT_READ:
                staged[: len(value) // 2] = value[: len(value) // 2]
                return len(value) // 2
            case Fault.WRONG_LENGTH:
                staged[:] = value[: len(staged)]
                return len(value) + 4096
            case Fault.ZEROS:
                staged[:] = bytes(len(staged))
            case Fault.CORRUPT:
                staged[:] = value
                staged[len(value) // 3] ^= 1
            case Fault.STRANGER:
                block = memoryview(bytes(self.block_bytes))
                write_value(staged, block, bytes(byte ^ 0xFF for byte in key), self._scope)
            case _:
                staged[:] = value
        return len(staged)
