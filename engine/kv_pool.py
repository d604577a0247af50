"""The paged KV cache as torch views over memory that somebody else owns (a memfd shared between processes).

Layout: [block][layer][K,V][token][head][dim]. One block is one contiguous run of bytes over all layers, so a hand-off,
a pool put and a host copy are one (address, length) a block; attention reads a layer as strided views.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from engine.parallel import WHOLE, Part

LAYOUT = "block_nhd"
"""Name of this layout in a Fingerprint."""


class KvPool:
    """Views over `buffer`, which must be writable, hold at least num_blocks * block_bytes, and outlive the pool. Device
    memory comes as a uint8 tensor [bytes]. Ranks that share a model have one pool: a block holds the heads of rank 0,
    then those of rank 1 and so on, each rank's laid out as above, and stays one run of bytes. `part` says whose heads
    `blocks`, `keys` and `values` show; `kv_heads` counts those of all ranks.

    The pool never frees the buffer: drop every reference to the pool before closing an mmap.
    """

    def __init__(
        self,
        buffer: memoryview | mmap.mmap | bytearray | torch.Tensor,
        num_blocks: int,
        num_layers: int,
        page: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        part: Part = WHOLE,
    ) -> None:
        self.num_blocks, self.page, self.dtype = num_blocks, page, dtype
        self.block_bytes = self.bytes_per_block(num_layers, page, kv_heads, head_dim, dtype)
        self.token_bytes = kv_heads // part.ranks * head_dim * dtype.itemsize
        """Bytes of one token's keys in one layer."""
        needed = num_blocks * self.block_bytes
        if num_blocks < 1 or len(buffer) < needed:
            raise ValueError(f"buffer: {len(buffer)} bytes cannot hold {num_blocks} blocks of {self.block_bytes}")
        if isinstance(buffer, torch.Tensor):
            flat = buffer[:needed].view(dtype)
        else:
            flat = torch.frombuffer(buffer, dtype=dtype, count=needed // dtype.itemsize)
        self._whole = flat.view(num_blocks, part.ranks, num_layers, 2, page, kv_heads // part.ranks, head_dim)
        self.blocks = self._whole[:, part.rank]
        self.keys = [self.blocks[:, layer, 0] for layer in range(num_layers)]
        self.values = [self.blocks[:, layer, 1] for layer in range(num_layers)]
        """One view a layer: [num_blocks, page, kv_heads, head_dim]."""

    @staticmethod
    def bytes_per_block(num_layers: int, page: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers, keys and values."""
        return num_layers * 2 * page * kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values [T, kv_heads, head_dim] at `slots` [T] (block * page + offset)."""
        pages, offsets = slots // self.page, slots % self.page
        self.keys[layer][pages, offsets] = keys
        self.values[layer][pages, offsets] = values

    def copy_block(self, src: int, dst: int) -> None:
        """Copies all layers of block `src` over block `dst` (copy-on-write of a shared, partly filled block)."""
        self._whole[dst].copy_(self._whole[src])

    def clear_tails(self, tails: Sequence[tuple[int, int]]) -> None:
        """Zeroes the slots of each (block, first unused offset) up to the block's end, in all layers."""
        for block, used in tails:
            self._whole[block, :, :, :, used:].zero_()

    def __repr__(self) -> str:
        _, layers, _, page, heads, dim = self.blocks.shape
        shape = f"{layers} layers, {page} tokens, {heads} heads of {dim}, {self.dtype}"
        return f"KvPool({self.num_blocks} blocks of {self.block_bytes} bytes: {shape})"


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_named(name: str) -> torch.dtype:
    """ "auto" (float32: the CPU computes in it), "float32", "bfloat16" or "float16" as a torch dtype."""
    if name == "auto":
        return torch.float32
    if name not in _DTYPES:
        raise ValueError(f"dtype: {name!r}; allowed: auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]
