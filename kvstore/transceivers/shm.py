"""KV blocks in a memfd that other processes of the same host read in place.

    page 0            header: magic, version, sizes, incarnation
    page 1 ..         generation table: one int64 a block, the number of owners that the block has had
    page k ..         blocks

The owner bumps a block's generation before a new owner writes to it; a reader copies and compares afterwards, so bytes
of a later owner are never taken for the ones that were offered. (The order of plain stores that this needs is given on
x86-64; on machines with weaker ordering the interpreter's lock operations around both sides stand for the fences.)
The memfd has no name: it is opened through /proc/<pid>/fd/<fd> and ends with its last mapping, so a killed owner leaves
nothing behind. Its size is sealed, so a mapping never faults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import mmap
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvstore.errors import StaleBlock, TransferError
from kvstore.handoff import Handle, SharedMemory
from kvstore.transceivers.base import OverCheck
from kvstore.transceivers.copying import Copiers, copy_bytes

log = logging.getLogger(__name__)

_MAGIC = b"KVBLOCKS"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQ64s")  # magic, version, (zero), num_blocks, block_bytes, incarnation
HEADER_SIZE = _HEADER.size
TABLE_OFFSET = mmap.PAGESIZE
_WORTH_SHARING = 4 * 1024 * 1024  # bytes of one read from which on a second thread helps to copy
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def host_id() -> str:
    """Equal for two processes exactly when one finds the other under /proc by the process id it knows itself by."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


@dataclasses.dataclass(frozen=True, slots=True)
class PoolLayout:
    num_blocks: int
    block_bytes: int

    @property
    def blocks_offset(self) -> int:
        return mmap.PAGESIZE + _pages(8 * self.num_blocks)

    @property
    def size(self) -> int:
        return self.blocks_offset + _pages(self.num_blocks * self.block_bytes)

    def offset(self, block: int) -> int:
        return self.blocks_offset + block * self.block_bytes


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedPool:
    """The owner's side: `num_blocks` blocks of `block_bytes` bytes each."""

    def __init__(self, fd: int, layout: PoolLayout, mapping: mmap.mmap) -> None:
        self.num_blocks = layout.num_blocks
        self.block_bytes = layout.block_bytes
        self._fd = fd  # -1: nobody else can map the pool
        self._layout = layout
        self._mapping = mapping
        self._bytes = memoryview(self._mapping)
        table_end = mmap.PAGESIZE + 8 * layout.num_blocks
        self._generations = self._bytes[mmap.PAGESIZE : table_end].cast("q")
        blocks_end = layout.blocks_offset + layout.num_blocks * layout.block_bytes
        self.blocks_buffer = self._bytes[layout.blocks_offset : blocks_end]

    @classmethod
    def create(cls, num_blocks: int, block_bytes: int, incarnation: str, shared: bool = True) -> SharedPool:
        """`shared`: a memfd. Without, private memory of huge pages, which other processes can read by system calls and
        networks only, and three times as fast by those. OSError when the machine has no room; ValueError for sizes
        below one."""
        name = incarnation.encode()
        if num_blocks < 1 or block_bytes < 1 or len(name) > 64:
            raise ValueError(f"no pool of {num_blocks} blocks of {block_bytes} bytes for incarnation {incarnation!r}")
        layout = PoolLayout(num_blocks, block_bytes)
        header = _HEADER.pack(_MAGIC, _VERSION, 0, num_blocks, block_bytes, name)
        if not shared:
            mapping = mmap.mmap(-1, layout.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
            mapping[: len(header)] = header
            return cls(-1, layout, mapping)
        fd = os.memfd_create("kv-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, layout.size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            os.pwrite(fd, header, 0)
            return cls(fd, layout, mmap.mmap(fd, layout.size))
        except BaseException:
            os.close(fd)
            raise

    @property
    def address(self) -> int:
        return int(np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data)

    @property
    def size(self) -> int:
        return self._layout.size

    @property
    def fd(self) -> int:
        """Of the memfd, for a child process that maps it too."""
        return self._fd

    def offset(self, block: int) -> int:
        """Of a block in the mapping, in bytes."""
        return self._layout.offset(block)

    def block(self, block: int) -> memoryview:
        start = self._layout.offset(block)
        return self._bytes[start : start + self.block_bytes]

    def bump(self, block: int) -> None:
        """To be called when a block gets a new owner, before anything is written to it."""
        self._generations[block] += 1

    def generation(self, block: int) -> int:
        return self._generations[block]

    def descriptor(self) -> SharedMemory:
        if self._fd < 0:
            raise RuntimeError("the pool is closed, or private")
        return SharedMemory(host_id=host_id(), pid=os.getpid(), fd=self._fd, size=self._layout.size)

    def close(self) -> None:
        """Nobody can open the pool afterwards. Views that others hold keep the memory itself alive."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class SharedPoolReader:
    """Another process's pool, mapped read-only."""

    def __init__(self, mapping: mmap.mmap, layout: PoolLayout, path: str, inode: int) -> None:
        self.num_blocks = layout.num_blocks
        self.block_bytes = layout.block_bytes
        self._layout = layout
        self._path = path
        self._inode = inode
        self._mapping = mapping
        self._bytes = memoryview(mapping)
        self._generations = np.frombuffer(mapping, dtype=np.int64, count=layout.num_blocks, offset=mmap.PAGESIZE)

    @classmethod
    def open(cls, descriptor: SharedMemory, incarnation: str) -> SharedPoolReader:
        """TransferError when this is another host, or the owner is gone, or what is there is not its pool."""
        if descriptor.host_id != host_id():
            raise TransferError("the block pool is in the memory of another host")
        path = f"/proc/{descriptor.pid}/fd/{descriptor.fd}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(f"the owner of the block pool cannot be reached: {error}") from None
        try:
            layout = _check(fd, descriptor, incarnation)
            mapping = mmap.mmap(fd, layout.size, prot=mmap.PROT_READ)
            return cls(mapping, layout, path, os.fstat(fd).st_ino)
        except (OSError, ValueError) as error:
            raise TransferError(f"{path} is no block pool: {error}") from None
        finally:
            os.close(fd)

    def read(
        self,
        block_ids: Sequence[int],
        generations: Sequence[int],
        into: Sequence[memoryview],
        copiers: Copiers | None = None,
    ) -> None:
        """Copy whole blocks into buffers of `block_bytes` each, without the interpreter lock.

        StaleBlock when a block had another owner before or during the copy; then all of `into` is worthless.
        TransferError for a block that the pool does not have and for buffers of another size.
        """
        if not len(block_ids) == len(generations) == len(into):
            raise TransferError(f"{len(block_ids)} blocks, {len(generations)} generations, {len(into)} buffers")
        for block, buffer in zip(block_ids, into, strict=True):
            if not 0 <= block < self.num_blocks:
                raise TransferError(f"block {block} of a pool of {self.num_blocks}")
            if buffer.nbytes != self.block_bytes:
                raise TransferError(f"a buffer of {buffer.nbytes} bytes for a block of {self.block_bytes}")

        def copy(i: int) -> None:
            start = self._layout.offset(block_ids[i])
            copy_bytes(into[i], self._bytes[start : start + self.block_bytes])

        if copiers is None:
            for i in range(len(block_ids)):
                copy(i)
        else:
            copiers.each(copy, len(block_ids), self.block_bytes)
        for block, generation in zip(block_ids, generations, strict=True):
            current = int(self._generations[block])
            if current != generation:
                raise StaleBlock(f"block {block} was offered at generation {generation} and is at {current}")

    def owner_alive(self) -> bool:
        try:
            return os.stat(self._path).st_ino == self._inode
        except OSError:
            return False

    def close(self) -> None:
        """No read may be running."""
        del self._bytes, self._generations
        self._mapping.close()


def parse_header(header: bytes) -> tuple[PoolLayout, str]:
    """Layout and incarnation. ValueError for anything but a whole header."""
    if len(header) < HEADER_SIZE:
        raise ValueError(f"{len(header)} bytes")
    magic, version, _, num_blocks, block_bytes, name = _HEADER.unpack(header)
    if magic != _MAGIC or version != _VERSION:
        raise ValueError(f"magic {magic!r}, version {version}")
    if num_blocks < 1 or block_bytes < 1:
        raise ValueError(f"{num_blocks} blocks of {block_bytes} bytes")
    return PoolLayout(num_blocks, block_bytes), name.rstrip(b"\0").decode(errors="replace")


def _check(fd: int, descriptor: SharedMemory, incarnation: str) -> PoolLayout:
    """The layout that the header claims, after everything in it was compared. ValueError names what differs."""
    layout, found = parse_header(os.pread(fd, HEADER_SIZE, 0))
    if found != incarnation:
        raise ValueError(f"it belongs to incarnation {found}, not {incarnation}")
    if not layout.size == descriptor.size == os.fstat(fd).st_size:
        raise ValueError(f"{os.fstat(fd).st_size} bytes where {descriptor.size} are announced")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("its size is not sealed")
    return layout


@dataclasses.dataclass(slots=True)
class _Cached:
    reader: SharedPoolReader
    users: int = 0
    dropped: bool = False


class ReaderCache:
    """Open readers by incarnation, for several threads.

    A dead owner's pool can still be read (its bytes and generations are what they were), and is closed when the next
    pool is opened.
    """

    def __init__(self, limit: int = 16) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._readers: OrderedDict[str, _Cached] = OrderedDict()

    def __len__(self) -> int:
        return len(self._readers)

    @contextlib.contextmanager
    def reader(self, descriptor: SharedMemory, incarnation: str) -> Iterator[SharedPoolReader]:
        """TransferError as for SharedPoolReader.open."""
        cached = self._take(descriptor, incarnation)
        try:
            yield cached.reader
        finally:
            self._give_back(cached)

    def close(self) -> None:
        with self._lock:
            for incarnation in list(self._readers):
                self._drop(incarnation)

    def _take(self, descriptor: SharedMemory, incarnation: str) -> _Cached:
        with self._lock:
            cached = self._readers.get(incarnation)
            if cached is None:
                self._sweep()
                cached = self._readers[incarnation] = _Cached(SharedPoolReader.open(descriptor, incarnation))
            self._readers.move_to_end(incarnation)
            cached.users += 1
            return cached

    def _give_back(self, cached: _Cached) -> None:
        with self._lock:
            cached.users -= 1
            if cached.dropped and cached.users == 0:
                cached.reader.close()

    def _sweep(self) -> None:
        dead = [name for name, cached in self._readers.items() if not cached.reader.owner_alive()]
        surplus = [name for name in self._readers if name not in dead][: max(0, len(self._readers) - self._limit + 1)]
        for incarnation in dead + surplus:
            self._drop(incarnation)

    def _drop(self, incarnation: str) -> None:
        cached = self._readers.pop(incarnation)
        cached.dropped = True
        if cached.users == 0:
            cached.reader.close()


class ShmTransceiver:
    """Copies out of the pools of other processes of this host. `block(number)`: the bytes of a block here."""

    name = "shm"
    batch = 16

    def __init__(self, block: Callable[[int], memoryview]) -> None:
        self._block = block
        self._readers = ReaderCache()
        self._copiers = Copiers(_WORTH_SHARING)
        self._host_id = host_id()

    def descriptor(self) -> None:
        return None

    def reaches(self, handle: Handle) -> bool:
        return handle.shared_memory is not None

    def fetch(
        self, handle: Handle, ids: Sequence[int], generations: Sequence[int], blocks: Sequence[int], over: OverCheck
    ) -> None:
        assert handle.shared_memory is not None
        with self._readers.reader(handle.shared_memory, handle.incarnation) as reader:
            reader.read(ids, generations, [self._block(block) for block in blocks], self._copiers)

    def holding(self, open_offers: bool) -> None:
        pass

    def close(self) -> None:
        self._copiers.close()
        self._readers.close()
