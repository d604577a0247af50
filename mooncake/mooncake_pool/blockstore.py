"""What an engine asks of a block store, and how a block lies in it.

A stored value is the block followed by 64 bytes that say what it is. A read counts only when the trailer names the
key, the scope and the length asked for, and the checksum fits: a store that gives other bytes gives a miss.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import quote

import xxhash

from kvstore.hashing import KEY_BYTES
from kvstore.transceivers.copying import copy_bytes

TRAILER = struct.Struct("<8sQ16s16sQ8x")
"""magic, block length in bytes, block key, xxh3-128 of the block seeded by the scope, scope."""
TRAILER_BYTES = TRAILER.size
MAGIC = b"TDKVBLK1"

_CACHED_BYTES = 512 * 1024
"""Copied and hashed at a time: small enough to be in the cache still when it is hashed, and large enough to seldom wait
for the interpreter lock."""


class BlockStore(Protocol):
    """Blocks by key. Blocking calls, safe from several threads; pool trouble is a short answer, never an exception."""

    def contains(self, keys: Sequence[bytes], timeout: float) -> int:
        """Length of the leading run of `keys` that is present."""

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout: float) -> int:
        """Length of the leading run that was loaded, verified and copied into the buffers given."""

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview], timeout: float) -> int:
        """How many are in the store afterwards; those that were there already count."""

    def state(self) -> str:
        """ "up", or "degraded: " and the reason."""

    def close(self) -> None:
        """Takes back what was lent to the store. Further calls answer 0."""


def key_prefix(
    model_key: str,
    tokens_per_block: int,
    block_bytes: int,
    fingerprint: str,
    world: int = 1,
    rank: int = 0,
    group: int = 0,
) -> str:
    """What stands between namespace and hash in a key text: everything that block bytes depend on."""
    return f"{key_part(model_key)}/w{world}r{rank}/lg{group}/t{tokens_per_block}b{block_bytes}/{key_part(fingerprint)}"


def key_part(text: str) -> str:
    """`text` without the characters that break the store's HTTP listings (comma, ampersand, newline, ...)."""
    return quote(text, safe="/:@+=~")


def scope_of(prefix: str) -> int:
    """64 bits that bind a value to the namespace, model and layout in its key text."""
    return xxhash.xxh3_64_intdigest(prefix.encode())


def write_value(value: memoryview, block: memoryview, key: bytes, scope: int) -> None:
    """Fills `value` with the block and its trailer, checksummed while it passes through the cache."""
    length = len(value) - TRAILER_BYTES
    checksum = _copy_and_hash(value[:length], block, scope)
    TRAILER.pack_into(value, length, MAGIC, length, key, checksum, scope)


def read_value(value: memoryview, block: memoryview, key: bytes, scope: int) -> bool:
    """Copies the block inside `value`, which another process may be changing meanwhile; True when it is the one
    asked for. `block` holds anything otherwise.

    `value` has the size that a block of this store takes, so a longer or shorter stored value never passes.
    """
    length = len(value) - TRAILER_BYTES
    magic, stored_length, stored_key, checksum, stored_scope = TRAILER.unpack_from(value, length)
    if (magic, stored_length, stored_key, stored_scope) != (MAGIC, length, key, scope):
        return False
    return bool(_copy_and_hash(block, value[:length], scope) == checksum)


def _copy_and_hash(target: memoryview, source: memoryview, scope: int) -> bytes:
    """Checksum of what `target` holds afterwards."""
    checksum = xxhash.xxh3_128(seed=scope)
    for start in range(0, len(target), _CACHED_BYTES):
        part = target[start : start + _CACHED_BYTES]
        copy_bytes(part, source[start : start + _CACHED_BYTES])
        checksum.update(part)
    return checksum.digest()


def check_call(keys: Sequence[bytes], buffers: Sequence[memoryview] | None, block_bytes: int) -> None:
    """ValueError for what can only be a caller's mistake."""
    for key in keys:
        if len(key) != KEY_BYTES:
            raise ValueError(f"block key of {len(key)} bytes: {KEY_BYTES} are needed")
    if buffers is None:
        return
    if len(buffers) != len(keys):
        raise ValueError(f"{len(keys)} keys but {len(buffers)} buffers")
    for buffer in buffers:
        if buffer.nbytes != block_bytes:
            raise ValueError(f"block buffer of {buffer.nbytes} bytes: this store's blocks have {block_bytes}")
