"""Blocks, keys and clients for tests that use a real pool."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable
from pathlib import Path

from pool_master import PoolMaster, wait_until

from mooncake_pool.remote import PoolClient, key_prefix

SIZE = 256 * 1024
MIB = 1024 * 1024
PREFIX = key_prefix("tiny", 32, SIZE, "f00d")
Starter = Callable[..., PoolClient]


def keys_of(*names: int) -> list[bytes]:
    return [name.to_bytes(16, "big") for name in names]


def block_of(name: int) -> memoryview:
    return memoryview((name * 2654435761 % 2**32).to_bytes(4, "big") * (SIZE // 4))


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(SIZE)) for _ in range(count)]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def up(client: PoolClient, seconds: float = 20.0) -> PoolClient:
    wait_until(lambda: client.state() == "up", seconds, f"pool client up, is {client.state()}")
    return client


def agent_pid(client: PoolClient) -> int:
    assert client._access.link is not None
    return client._access.link.process.pid


def segment_names(master: PoolMaster) -> list[str]:
    url = f"http://127.0.0.1:{master.manifest().metrics_port}/get_all_segments"
    with urllib.request.urlopen(url, timeout=2) as answer:
        return sorted(answer.read().decode().split())
