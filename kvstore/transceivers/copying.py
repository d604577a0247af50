"""Copies of blocks in the memory of this host: in pieces that processors are fastest at, by two threads if it pays."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_PIECE = 512 * 1024
"""One memmove of more is up to a third slower where it is more than a core's own cache holds."""
_OVERLAP = 64
_STRIDE = _PIECE - _OVERLAP


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies buffers of one length, contiguous and apart from each other, without the interpreter lock.

    ValueError for lengths that differ.
    """
    length = target.nbytes
    if source.nbytes != length:
        raise ValueError(f"{source.nbytes} bytes to copy into {length}")
    done = 0
    if length > _PIECE:
        # Rows that overlap are not joined to one memmove again, and one call for all rows gives the lock up only once.
        rows = (length - _OVERLAP) // _STRIDE
        np.copyto(_rows(target, rows), _rows(source, rows))
        done = rows * _STRIDE + _OVERLAP
    if done < length:
        np.copyto(np.frombuffer(target, np.uint8, offset=done), np.frombuffer(source, np.uint8, offset=done))


def _rows(buffer: memoryview, rows: int) -> Bytes:
    return np.ndarray((rows, _PIECE), np.uint8, buffer, 0, (_STRIDE, 1))


class Copiers:
    """Helping threads for work that gives the interpreter lock up, as copying does.

    One core alone does not fill the memory's bandwidth, so a caller and one helper share the blocks of a call.
    """

    def __init__(self, worth_sharing: int, helpers: int = 2) -> None:
        """`worth_sharing`: bytes of a call from which on a second thread pays."""
        self._worth_sharing = worth_sharing
        self._helpers = ThreadPoolExecutor(helpers, "block-copy")

    def each(self, work: Callable[[int], None], count: int, block_bytes: int) -> None:
        """`work` of 0 .. count-1, each on a block. Both threads have ended when this returns or raises.

        Each takes the next block, so that a helper whom a busy machine does not let run delays nobody.
        """
        numbers = itertools.count()

        def take() -> None:
            while (i := next(numbers)) < count:
                work(i)

        if count < 2 or count * block_bytes < self._worth_sharing:
            take()
            return
        try:
            helper = self._helpers.submit(take)
        except RuntimeError:  # closed meanwhile: the caller goes on alone
            take()
            return
        try:
            take()
        finally:
            if not helper.cancel():
                helper.result()

    def close(self) -> None:
        """Calls that are under way come to their end."""
        self._helpers.shutdown()
