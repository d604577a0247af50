"""Blocks in the memory of one GPU, or of GPUs joined by NVLink: another process's pool opened by a CUDA IPC handle,
gathered with one kernel.

A copy_ a block is bound by launches (150 GB/s); one gather over all blocks reaches what the memory gives. The reader
opens each pool once. Generations are compared afterwards, like everywhere: they stay in host memory, where the owner's
loop bumps them, and are read through the pool's memfd.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvstore.errors import TransferError
from kvstore.handoff import Handle, RemoteMemory
from kvstore.transceivers.base import OverCheck

log = logging.getLogger(__name__)

_POOLS = 16  # other workers' pools kept open

Gather = Callable[[Any, Sequence[int], Any, Sequence[int]], None]
"""gather(source, ids, target, blocks): source[ids[i]] → target[blocks[i]], rows of bytes, done when it returns."""

CheckGenerations = Callable[[Handle, Sequence[int], Sequence[int]], None]
"""Raises StaleBlock for a block of the handle's pool that has another generation."""


def index_gather(source: Any, ids: Sequence[int], target: Any, blocks: Sequence[int]) -> None:
    """One gather and one scatter of torch's. Also for a pool on another GPU, whose pointers Triton refuses."""
    import torch

    rows = source.index_select(0, torch.tensor(ids, device=source.device))
    target.index_copy_(0, torch.tensor(blocks, device=target.device), rows.to(target.device, non_blocking=True))
    if target.is_cuda:
        torch.cuda.current_stream(target.device).synchronize()


def kernel_gather(source: Any, ids: Sequence[int], target: Any, blocks: Sequence[int]) -> None:
    """One kernel, straight from pool to pool of one GPU; twice as fast as `index_gather`."""
    import torch

    width = source.shape[1]
    if source.device != target.device or width % 8:
        index_gather(source, ids, target, blocks)
        return
    from engine.kernels.gather import gather_rows

    pairs = torch.from_numpy(np.array((ids, blocks), dtype=np.int64)).to(target.device)
    gather_rows(source.view(torch.int64), pairs[0], target.view(torch.int64), pairs[1])
    torch.cuda.current_stream(target.device).synchronize()


class CudaIpcTransceiver:
    """`pool`: this worker's blocks, a contiguous CUDA tensor [num_blocks, ...]. `host`: equal for processes that share
    GPUs (kvstore.transceivers.shm.host_id)."""

    name = "cuda_ipc"
    batch = 4096

    def __init__(
        self, pool: Any, incarnation: str, host: str, check: CheckGenerations, gather: Gather = kernel_gather
    ) -> None:
        self._pool = _rows(pool)
        self._incarnation = incarnation
        self._host = host
        self._check = check
        self._gather = gather
        self._open: dict[str, Any] = {}  # by incarnation
        rows, width = self._pool.shape
        self._descriptor = RemoteMemory(host, 0, rows, width, share(self._pool))

    def descriptor(self) -> RemoteMemory:
        return self._descriptor

    def reaches(self, handle: Handle) -> bool:
        remote = handle.remotes.get(self.name)
        return remote is not None and remote.agent == self._host and handle.incarnation != self._incarnation

    def fetch(
        self, handle: Handle, ids: Sequence[int], generations: Sequence[int], blocks: Sequence[int], over: OverCheck
    ) -> None:
        remote = handle.remotes[self.name]
        if remote.block_bytes != self._descriptor.block_bytes:
            raise TransferError(f"blocks of {remote.block_bytes} bytes there, {self._descriptor.block_bytes} here")
        if ids and not 0 <= min(ids) <= max(ids) < remote.num_blocks:
            raise TransferError(f"a block outside the pool of {remote.num_blocks}")
        self._gather(self._opened(handle.incarnation, remote), ids, self._pool, blocks)
        self._check(handle, ids, generations)

    def holding(self, open_offers: bool) -> None:
        pass

    def close(self) -> None:
        self._open.clear()

    def _opened(self, incarnation: str, remote: RemoteMemory) -> Any:
        pool = self._open.get(incarnation)
        if pool is None:
            while len(self._open) >= _POOLS:
                del self._open[next(iter(self._open))]
            try:
                pool = self._open[incarnation] = opened(remote.metadata)
            except (RuntimeError, OSError, ValueError, pickle.UnpicklingError) as error:
                raise TransferError(f"the GPU pool of {incarnation} cannot be opened: {error}") from None
        return pool


def _rows(pool: Any) -> Any:
    import torch

    return pool.view(pool.shape[0], -1).view(torch.uint8)


# ---------------------------------------------------------------- IPC handles


def share(rows: Any) -> bytes:
    """What another process needs to open this tensor. It must outlive its readers."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(rows)  # type: ignore[no-untyped-call]
    return pickle.dumps(arguments)


def opened(metadata: bytes) -> Any:
    """The tensor behind `share`. Only plain values and torch's own types are accepted: the bytes come from a peer."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    return rebuild_cuda_tensor(*_Plain(io.BytesIO(metadata)).load())  # type: ignore[no-untyped-call]


class _Plain(pickle.Unpickler):
    _ALLOWED = frozenset({
        ("torch", "Tensor"), ("torch", "Size"), ("torch", "uint8"), ("torch.storage", "UntypedStorage"),
        ("torch.storage", "TypedStorage"), ("torch._utils", "_rebuild_dtype"),
    })  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a pool's descriptor")
        return super().find_class(module, name)
