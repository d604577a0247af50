"""The group of ranks on CPUs: collectives of torch.distributed over gloo, on this machine's loopback."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from engine.parallel import Part

_JOIN_TIMEOUT = datetime.timedelta(seconds=120)  # until every rank is there, and for one collective


class GlooGroup:
    """See parallel.Group. Made by every rank at the same time; one a process."""

    def __init__(self, part: Part, store: str) -> None:
        """`store`: a path that all ranks see and nobody used before. RuntimeError if a rank does not come."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.part = part
        dist.init_process_group(
            "gloo",
            store=FileStore(store, part.ranks),
            rank=part.rank,
            world_size=part.ranks,
            timeout=_JOIN_TIMEOUT,
        )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel():
            dist.all_reduce(x)
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return x.new_empty(x.shape[0], x.shape[1] * self.part.ranks)
        if self.part.rank:
            dist.gather(x.contiguous(), dst=0)
            return x
        pieces = [torch.empty_like(x) for _ in range(self.part.ranks)]
        dist.gather(x.contiguous(), pieces, dst=0)
        return torch.cat(pieces, dim=1)

    def wait(self) -> None:
        dist.all_reduce(torch.zeros(1))

    def close(self) -> None:
        dist.destroy_process_group()
