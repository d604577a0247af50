"""Blocks of 2 MiB between two processes on one GPU, and between the GPU and pinned host memory.

python bench/gpu/gpu_copies.py

TB/s count a block once. `fetch` is the transceiver's whole call by the host's clock; a kernel alone is timed by device
events. The copies of one large buffer show what the memory gives.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gpu_rig as rig
import msgspec
import torch

from engine.cuda_ipc import CudaIpcTransceiver, kernel_gather, opened
from engine.kernels.gather import gather_rows
from kvstore.handoff import HANDLE_VERSION, Handle, RemoteMemory, StartState

BLOCK = 2 * 1024 * 1024
BLOCKS = 2048
LAUNCHES = ((8192, 8), (4096, 8), (4096, 4), (2048, 8), (2048, 4), (1024, 4), (1024, 8), (16384, 16))


def owner() -> None:
    """The other process: a pool whose bytes of block i are i % 251, shared until the reader ends."""
    pool = torch.zeros(BLOCKS, BLOCK, dtype=torch.uint8, device="cuda")
    pool += torch.arange(BLOCKS, device="cuda").remainder(251).to(torch.uint8)[:, None]
    torch.cuda.synchronize()
    way = CudaIpcTransceiver(pool, "there", "host", lambda *_: None)
    print(msgspec.msgpack.encode(way.descriptor()).hex(), flush=True)
    sys.stdin.read()


def by_clock(run: Callable[[], object], repeat: int = 20) -> float:
    times = []
    for _ in range(repeat + 3):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[3:])


def scattered(count: int, seed: int) -> list[int]:
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed))
    return [int(block) for block in order[:count]]


def kernels(theirs: Any, ours: Any) -> None:
    for count in (256, 1024):
        ids, blocks = (torch.tensor(scattered(count, seed), device="cuda") for seed in (1, 2))
        source, target = theirs.view(torch.int64), ours.view(torch.int64)
        line = []
        for words, warps in LAUNCHES:
            ours.zero_()
            run = functools.partial(gather_rows, source, ids, target, blocks, words, warps)
            seconds = rig.timed(run, 15)
            right = bool((ours[blocks][:, ::4096] == (ids % 251).to(torch.uint8)[:, None]).all())
            line.append(f"{words},{warps}: {count * BLOCK / seconds / 1e12:.2f}{'' if right else ' WRONG'}")
        print(f"gather kernel, {count} blocks, TB/s by words,warps | " + " | ".join(line), flush=True)


def fetches(way: CudaIpcTransceiver, handle: Handle, ours: Any) -> None:
    for count in (16, 64, 256, 1024):
        ids, blocks = scattered(count, 1), scattered(count, 2)
        ours.zero_()
        fetch = functools.partial(way.fetch, handle, ids, [1] * count, blocks, lambda: False)
        seconds = by_clock(fetch)
        assert ours[blocks, -1].tolist() == [block % 251 for block in ids]
        print(f"cuda_ipc fetch, {count} blocks: {count * BLOCK / seconds / 1e12:.2f} TB/s, {seconds * 1e3:.3f} ms")


def between_processes() -> None:
    process = subprocess.Popen(
        [sys.executable, __file__, "owner"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        ours = torch.zeros(BLOCKS, BLOCK, dtype=torch.uint8, device="cuda")
        remote = msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline()), type=RemoteMemory)
        way = CudaIpcTransceiver(ours, "here", "host", lambda *_: None, kernel_gather)
        start = StartState(0, 1, 1)
        handle = Handle(HANDLE_VERSION, 1, "there", "f", "", 1, [0], [1], [start], remotes={"cuda_ipc": remote})
        fetches(way, handle, ours)
        theirs = opened(remote.metadata)
        kernels(theirs, ours)
        seconds = rig.timed(lambda: ours.copy_(theirs), 10)
        print(f"one copy of the whole pool: {ours.nbytes / seconds / 1e12:.2f} TB/s", flush=True)
    finally:
        process.kill()
        process.wait()


def with_the_host() -> None:
    pinned = torch.empty(256, BLOCK, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(256, BLOCK, dtype=torch.uint8, device="cuda")

    def by_block(target: Any, source: Any) -> None:
        for block in range(256):
            target[block].copy_(source[block], non_blocking=True)

    for name, target, source in (("to the host", pinned, device), ("to the GPU", device, pinned)):
        whole = rig.timed(functools.partial(target.copy_, source, non_blocking=True), 8)
        blocks = rig.timed(functools.partial(by_block, target, source), 8)
        rates = [pinned.nbytes / seconds / 1e9 for seconds in (whole, blocks)]
        print(f"pinned, {name}: {rates[0]:.1f} GB/s whole, {rates[1]:.1f} GB/s block by block", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["owner"]:
        owner()
    else:
        between_processes()
        with_the_host()
