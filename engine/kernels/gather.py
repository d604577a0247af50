"""Rows of one tensor to rows of another, in one launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_WORDS = 8192  # of 8 bytes, a program
_WARPS = 8


@triton.jit
def _gather_kernel(source, ids, target, blocks, width, WORDS: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = offsets < width
    here = tl.load(ids + row) * width
    there = tl.load(blocks + row) * width
    tl.store(target + there + offsets, tl.load(source + here + offsets, mask=inside), mask=inside)


def gather_rows(source: Any, ids: Any, target: Any, blocks: Any, words: int = _WORDS, warps: int = _WARPS) -> None:
    """target[blocks[i]] = source[ids[i]] for contiguous int64 tensors [rows, width] of one device; `ids` and `blocks`
    are int64 tensors there too. A program of `warps` moves `words`. Not synchronised."""
    width = source.shape[1]
    grid = (len(ids), triton.cdiv(width, words))
    _gather_kernel[grid](source, ids, target, blocks, width, WORDS=words, num_warps=warps)
