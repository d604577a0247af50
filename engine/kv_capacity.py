"""How many tokens fit into a KV pool, before there is one."""

from __future__ import annotations

import dataclasses
from fractions import Fraction


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: int) -> int:
    """Keys and values of one token over all layers, on one rank."""
    return 2 * num_layers * num_kv_heads * head_dim * element_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class KvCapacity:
    num_blocks: int
    block_size: int  # tokens
    block_bytes: int

    @property
    def tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def sequences(self, length: int) -> int:
        """How many of `length` tokens, fully grown, are resident at once. Sequences share no block."""
        return self.num_blocks // -(-length // self.block_size)

    def __str__(self) -> str:
        return (
            f"{self.num_blocks} blocks of {self.block_size} tokens, {self.tokens} tokens, "
            f"{self.bytes} bytes ({self.bytes / 2**20:.1f} MiB, {self.block_bytes} bytes a block)"
        )


def capacity_of(free_bytes: int, fraction: float, token_bytes: int, block_size: int) -> KvCapacity:
    """The pool that `fraction` of `free_bytes` gives. The fraction is of what is free after weights and buffers."""
    pool = int(free_bytes * Fraction(str(fraction)))  # 0.9 of 60 GiB is 54 GiB, and not a block less
    block_bytes = token_bytes * block_size
    return KvCapacity(pool // block_bytes, block_size, block_bytes)
