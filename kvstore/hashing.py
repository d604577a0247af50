"""Block keys: the one identity of a KV block that the engine, the events, the router and the pool agree on.

A key covers a block's tokens and everything before them, so equal keys mean equal prefixes. Chain (documented for
TensorRT-LLM's Mooncake connector): ``seed = H("salt" + salt)``, ``key[i] = H(key[i-1] + tokens[i] as int64 little
endian)`` with H = blake2b, 16 bytes. An adapter's name, when there is one, is hashed into the seed.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16


def chain_seed(salt: str = "", lora: str = "") -> bytes:
    """Parent of the first block. `salt` separates tenants, `lora` separates adapters."""
    digest = blake2b(b"salt" + salt.encode(), digest_size=KEY_BYTES)
    if lora:
        digest.update(b"\x00lora" + lora.encode())
    return digest.digest()


def block_keys(
    tokens: Sequence[int], block_size: int, salt: str = "", lora: str = "", parent: bytes | None = None
) -> list[bytes]:
    """Keys of the full blocks of `tokens`; a trailing partial block has none.

    `parent` continues a chain: it is the key of the block just before ``tokens[0]``.
    """
    if block_size < 1:
        raise ValueError(f"block_size: {block_size} is not a positive number of tokens")
    packed = array("q", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    data = memoryview(packed.tobytes())
    step = 8 * block_size
    key = chain_seed(salt, lora) if parent is None else parent
    keys = []
    for start in range(0, len(data) - step + 1, step):
        digest = blake2b(key, digest_size=KEY_BYTES)
        digest.update(data[start : start + step])
        key = digest.digest()
        keys.append(key)
    return keys


_MASK32, _MASK64 = 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF


def _mix32(value: int, seed: int) -> int:
    value &= _MASK32
    for _ in range(2):
        value = ((value >> 16) ^ value) * 0x45D9F3B & _MASK32
    value = ((value >> 16) ^ value) + 0x9E3779B9 & _MASK32
    return seed ^ ((value + (seed << 6) + (seed >> 2)) & _MASK64)


def _mix64(value: int, seed: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    value ^= value >> 31
    return seed ^ ((value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _MASK64)


def v1_block_key(tokens: Sequence[int], parent: int = 0, lora_id: int | None = None, salt_id: int | None = None) -> int:
    """TensorRT-LLM's default event hash of one block: unsigned 64 bits. Spoken to real workers only."""
    seed = len(tokens) ^ (parent * 0xBF58476D1CE4E5B9 & _MASK64)
    if parent == 0 and salt_id is not None:
        seed = _mix64(salt_id, seed)
    for token in tokens:
        seed = _mix32(token, seed)
    if lora_id is not None:
        seed = _mix64(lora_id, seed)
    return seed
