"""The GPU transceiver: what can be told without a GPU, and a hand-off between two processes on one."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from engine.cuda_ipc import CudaIpcTransceiver, index_gather, opened
from kvstore.errors import StaleBlock, TransferError
from kvstore.handoff import HANDLE_VERSION, Handle, RemoteMemory, StartState

SIZE = 2 * 1024 * 1024
ROOT = Path(__file__).resolve().parent.parent.parent


def handle_of(remote: RemoteMemory, incarnation: str = "there") -> Handle:
    start = StartState(0, 1, 1)
    return Handle(HANDLE_VERSION, 1, incarnation, "f", "", 1, [0], [1], [start], remotes={"cuda_ipc": remote})


def test_the_gather_moves_whole_blocks() -> None:
    source = torch.arange(60, dtype=torch.uint8).view(6, 10)
    target = torch.zeros(4, 10, dtype=torch.uint8)
    index_gather(source, [5, 0], target, [1, 3])
    assert target[1].tolist() == source[5].tolist() and target[3].tolist() == source[0].tolist()
    assert not target[0].any() and not target[2].any()


def test_a_descriptor_cannot_run_code() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.system"):
        opened(pickle.dumps(os.system))


PEER = """
import sys, torch, msgspec
from engine.cuda_ipc import CudaIpcTransceiver
count = int(sys.argv[1])
pool = torch.zeros(count, 2 * 1024 * 1024, dtype=torch.uint8, device="cuda")
pool += torch.arange(count, device="cuda").remainder(251).to(torch.uint8)[:, None]
torch.cuda.synchronize()
way = CudaIpcTransceiver(pool, "there", "host", lambda *_: None)
print(msgspec.msgpack.encode(way.descriptor()).hex(), flush=True)
sys.stdin.read()
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_between_two_processes_on_one_gpu() -> None:
    count, batch = 512, 256
    process = subprocess.Popen(
        [sys.executable, "-c", PEER, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        remote = msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline()), type=RemoteMemory)
        pool = torch.zeros(count, SIZE, dtype=torch.uint8, device="cuda")
        checked: list[list[int]] = []
        way = CudaIpcTransceiver(pool, "here", "host", lambda handle, ids, generations: checked.append(list(ids)))
        handle = handle_of(remote)
        assert way.reaches(handle) and not way.reaches(handle_of(remote, "here"))
        ids, blocks = list(range(3, 3 + batch)), list(range(batch))
        way.fetch(handle, ids, [1] * batch, blocks, lambda: False)
        assert checked == [ids]
        assert pool[:batch, 0].tolist() == pool[:batch, -1].tolist() == [block % 251 for block in ids]
        seconds = []
        for _ in range(20):
            begun = time.perf_counter()
            way.fetch(handle, ids, [1] * batch, blocks, lambda: False)
            seconds.append(time.perf_counter() - begun)
        rate = batch * SIZE / sorted(seconds)[10] / 1e12
        print(f"cuda_ipc: {rate:.2f} TB/s, {batch} blocks of 2 MiB in {1e3 * sorted(seconds)[10]:.3f} ms")
        small = []
        for _ in range(20):
            begun = time.perf_counter()
            way.fetch(handle, ids[:16], [1] * 16, blocks[:16], lambda: False)
            small.append(time.perf_counter() - begun)
        print(f"cuda_ipc: 16 blocks in {1e3 * sorted(small)[10]:.3f} ms")
        assert rate > 1.0

        def stale(*_: object) -> None:
            raise StaleBlock("block 3")

        with pytest.raises(StaleBlock):
            CudaIpcTransceiver(pool, "here", "host", stale).fetch(handle, [3], [1], [0], lambda: False)
        with pytest.raises(TransferError, match="outside"):
            way.fetch(handle, [count], [1], [0], lambda: False)
        with pytest.raises(TransferError, match="1024 bytes there"):
            other = msgspec.structs.replace(remote, block_bytes=1024)
            way.fetch(handle_of(other), [0], [1], [0], lambda: False)
    finally:
        process.kill()
        process.wait()
