"""The host memory tier of a KV pool that is a tensor, on whatever device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from engine.host_tier import HostTier


def tensor_tier(
    size: int, blocks: torch.Tensor, on_stream: Callable[[], AbstractContextManager[object]] = nullcontext
) -> HostTier | None:
    """At most `size` bytes for `blocks` [num_blocks, ...]; None if not one fits.

    Copies are issued on the stream of `on_stream` and not waited for. That has to be the one of all steps: a block is
    saved before its next owner writes to it, and is back before anybody reads it, by the order of the stream alone.
    """
    flat = blocks.view(blocks.shape[0], -1)
    count = size // (flat.shape[1] * flat.element_size())
    if count < 1:
        return None
    places = torch.empty(count, flat.shape[1], dtype=flat.dtype, pin_memory=blocks.is_cuda)

    def copy_out(block: int, place: int) -> None:
        with torch.inference_mode(), on_stream():
            places[place].copy_(flat[block], non_blocking=True)

    def copy_in(place: int, block: int) -> None:
        with torch.inference_mode(), on_stream():
            flat[block].copy_(places[place], non_blocking=True)

    return HostTier(count, copy_out, copy_in)
