"""The memory that an engine process and its agent share: a memfd cut into equal slots."""

from __future__ import annotations

import ctypes
import mmap
import os

PAGE = mmap.PAGESIZE


class StagingArea:
    """`slots` slots of `value_bytes` each, every one on its own page boundary."""

    def __init__(self, fd: int, value_bytes: int, slots: int) -> None:
        self.fd = fd
        self.value_bytes = value_bytes
        self.slots = slots
        self.slot_bytes = slot_stride(value_bytes)
        self._map = mmap.mmap(fd, self.slot_bytes * slots)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, value_bytes: int, slots: int) -> StagingArea:
        fd = os.memfd_create("mooncake-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, slot_stride(value_bytes) * slots)
            return cls(fd, value_bytes, slots)
        except BaseException:
            os.close(fd)
            raise

    @property
    def size(self) -> int:
        return self.slot_bytes * self.slots

    def value(self, slot: int) -> memoryview:
        start = slot * self.slot_bytes
        return self._view[start : start + self.value_bytes]

    def address(self) -> int:
        """Of slot 0 in this process; keeps the mapping alive."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close_fd(self) -> None:
        """The mapping itself goes when the last view of a slot does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def slot_stride(value_bytes: int) -> int:
    return -(-value_bytes // PAGE) * PAGE
