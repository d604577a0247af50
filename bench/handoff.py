"""How fast KV blocks get from one process to another: GB/s and latency a transceiver, block size and batch.

    python bench/handoff.py [--rounds 9] [--transceivers shm,nixl,mooncake,pool] [--quick] [--json FILE]

Two processes on this host, each with a block pool as an engine has it; one reads the other's. A memcpy of as many bytes
within one process and a plain TCP socket are measured in the same rounds, in turn, so that a busy machine slows all
of them alike. Figures are medians; a transceiver's time includes its verification of the blocks' owners.

Blocks are in shared memory, and for nixl, as in an engine that hands off by it, in private memory of huge pages. The
ratios are medians over the rounds, to a memcpy into the same kind of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "mooncake")]

from kvstore.errors import TransferError  # noqa: E402 - after the path is set
from kvstore.handoff import HANDLE_VERSION, Handle, StartState  # noqa: E402
from kvstore.transceivers.base import Transceiver  # noqa: E402
from kvstore.transceivers.shm import SharedPool, ShmTransceiver  # noqa: E402

KIB, MIB = 1024, 1024 * 1024
CASES = [(64 * KIB, 1), (64 * KIB, 64), (256 * KIB, 64), (MIB, 1), (MIB, 64), (2 * MIB, 32), (16 * MIB, 8)]
QUICK = [(64 * KIB, 1), (MIB, 64)]
RATIO_CASE = (MIB, 64)
TARGETS = {"shm": 0.85, "nixl": 0.85, "pool": 0.6}
LIMIT = 30.0  # seconds for one read

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Action = Callable[[], None]
"""One transfer of all blocks of a case; raises TransferError."""


def open_transceiver(name: str, pages: SharedPool, incarnation: str) -> Transceiver:
    if name == "nixl":
        from kvstore.transceivers.nixl import NixlTransceiver

        return NixlTransceiver(pages, incarnation, "127.0.0.1")
    if name == "mooncake":
        from kvstore.transceivers.mooncake import MooncakeTransceiver

        return MooncakeTransceiver(pages, incarnation, "127.0.0.1")
    return ShmTransceiver(pages.block)


# ---------------------------------------------------------------- the process that is read from


def holder(size: int, count: int, names: list[str], pool: str | None) -> None:
    """Prints a handle and the port of the socket, and ends with its standard input."""
    incarnation = secrets.token_hex(8)
    pages = SharedPool.create(count, size, incarnation)
    private = SharedPool.create(count, size, incarnation, shared=False)
    for each in (pages, private):
        for block in range(count):
            each.bump(block)
            each.block(block)[:] = bytes([block % 251 + 1]) * size
    ways = [
        open_transceiver(name, private if name == "nixl" else pages, incarnation) for name in names if name != "pool"
    ]
    for way in ways:
        way.holding(True)
    remotes = {way.name: remote for way in ways if (remote := way.descriptor()) is not None}
    handle = Handle(
        version=HANDLE_VERSION,
        handoff_id=1,
        incarnation=incarnation,
        fingerprint="bench",
        endpoint="",
        prompt_tokens=1,
        block_ids=list(range(count)),
        generations=[1] * count,
        starts=[StartState(0, 1, 1)],
        shared_memory=pages.descriptor(),
        remotes=remotes,
    )
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_send_blocks, args=(server, pages), daemon=True).start()
    stored = _put(pool, pages) if pool else 0
    print(json.dumps({"handle": handle.encode(), "port": server.getsockname()[1], "stored": stored}), flush=True)
    sys.stdin.read()
    for way in ways:
        way.close()


def _send_blocks(server: socket.socket, pages: SharedPool) -> None:
    connection, _ = server.accept()
    while request := connection.recv(4):
        (count,) = struct.unpack("<I", request)
        for block in range(count):
            connection.sendall(pages.block(block))


def _pool_client(pool: str, size: int, segment: int, role: str) -> Any:
    from engine.config import PoolConfig
    from mooncake_pool.remote import PoolClient, key_prefix

    config = PoolConfig(pool=pool, segment_size=segment, role=role, get_timeout=LIMIT)
    prefix = key_prefix("bench", 32, size, "0" * 32)
    client = PoolClient.start(config, prefix, size, secrets.token_hex(8))
    deadline = time.monotonic() + LIMIT
    while client.state() != "up":
        if time.monotonic() > deadline:
            client.close()
            raise TransferError(f"the pool is {client.state()}")
        time.sleep(0.05)
    return client


def keys(count: int) -> list[bytes]:
    return [index.to_bytes(16, "big") for index in range(count)]


def _put(pool: str, pages: SharedPool) -> int:
    count = pages.num_blocks
    client = _pool_client(pool, pages.block_bytes, 2 * count * pages.block_bytes + 64 * MIB, "producer")
    globals()["_kept"] = client
    return int(client.put(keys(count), [pages.block(block) for block in range(count)], LIMIT))


# ---------------------------------------------------------------- the process that reads


@contextlib.contextmanager
def started_holder(size: int, count: int, names: list[str], pool: str | None) -> Iterator[dict[str, Any]]:
    argv = [sys.executable, __file__, "--hold", str(size), str(count), ",".join(names), pool or ""]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise TransferError("the holding process did not start")
        yield json.loads(line)
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Case:
    """All ways of one block size and batch."""

    def __init__(self, size: int, count: int, hello: dict[str, Any], names: list[str], pool: str | None) -> None:
        self.size, self.count = size, count
        incarnation = secrets.token_hex(8)
        self.pages = SharedPool.create(count, size, incarnation)
        self.private = SharedPool.create(count, size, incarnation, shared=False)
        # Each way reads bytes that no other has just pulled into the cache.
        sources = [np.ones(size * count, dtype=np.uint8) for _ in range(2)]
        self._shared_bytes = np.frombuffer(self.pages.blocks_buffer, dtype=np.uint8)
        self._private_bytes = np.frombuffer(self.private.blocks_buffer, dtype=np.uint8)
        self.actions: dict[str, Action] = {
            "memcpy": lambda: self._memcpy(sources[0], self._shared_bytes),
            "memcpy_private": lambda: self._memcpy(sources[1], self._private_bytes),
            "socket": self._socket,
        }
        self._connection = socket.create_connection(("127.0.0.1", hello["port"]))
        handle = Handle.decode(hello["handle"])
        self._ways = [
            open_transceiver(name, self.private if name == "nixl" else self.pages, incarnation)
            for name in names
            if name != "pool"
        ]
        for way in self._ways:
            self.actions[way.name] = lambda way=way: self._fetch(way, handle)
        self._client: Any = None
        if pool is not None and hello["stored"] == count:
            self._client = _pool_client(pool, size, 16 * MIB, "consumer")
            self.actions["pool"] = self._get

    def close(self) -> None:
        self._connection.close()
        for way in self._ways:
            way.close()
        if self._client is not None:
            self._client.close()

    def right(self, name: str) -> bool:
        """The first and last byte of every block are the holder's."""
        blocks = (self._private_bytes if name == "nixl" else self._shared_bytes).reshape(self.count, self.size)
        wanted = np.arange(self.count) % 251 + 1
        return bool((blocks[:, 0] == wanted).all() and (blocks[:, -1] == wanted).all())

    def spoil(self) -> None:
        for whole in (self._private_bytes, self._shared_bytes):
            blocks = whole.reshape(self.count, self.size)
            blocks[:, 0] = blocks[:, -1] = 0

    def _memcpy(self, source: Bytes, into: Bytes) -> None:
        for block in range(self.count):
            part = slice(block * self.size, (block + 1) * self.size)
            into[part] = source[part]

    def _socket(self) -> None:
        self._connection.sendall(struct.pack("<I", self.count))
        view = self.pages.blocks_buffer
        while len(view):
            view = view[self._connection.recv_into(view) :]

    def _fetch(self, way: Transceiver, handle: Handle) -> None:
        deadline = time.monotonic() + LIMIT
        blocks = list(range(self.count))
        for start in range(0, self.count, way.batch):
            part = slice(start, start + way.batch)
            ids, generations = handle.block_ids[part], handle.generations[part]
            way.fetch(handle, ids, generations, blocks[part], lambda: time.monotonic() > deadline)

    def _get(self) -> None:
        found = self._client.get(keys(self.count), [self.pages.block(block) for block in range(self.count)], LIMIT)
        if found != self.count:
            raise TransferError(f"{found} of {self.count} blocks")


def measure(case: Case, rounds: int) -> dict[str, dict[str, float] | str]:
    """By way: median seconds and GB/s, or what went wrong. The first round warms up and checks the bytes."""
    seconds: dict[str, list[float]] = {name: [] for name in case.actions}
    failed: dict[str, str] = {}
    for turn in range(rounds + 1):
        for name, action in case.actions.items():
            if name in failed:
                continue
            if turn == 0:
                case.spoil()
            start = time.perf_counter()
            try:
                action()
            except TransferError as error:
                failed[name] = str(error)
                continue
            spent = time.perf_counter() - start
            if turn:
                seconds[name].append(spent)
            elif not name.startswith("memcpy") and not case.right(name):
                failed[name] = "wrong bytes"
    total = case.size * case.count
    figures: dict[str, dict[str, float] | str] = dict(failed)
    for name, spent in seconds.items():
        if name not in failed:
            middle = statistics.median(spent)
            # Round by round: a machine that is busy for a while then slows both sides of a ratio.
            memcpy = seconds["memcpy_private" if name == "nixl" else "memcpy"]
            ratio = statistics.median(copied / own for copied, own in zip(memcpy, spent, strict=True))
            figures[name] = {
                "seconds": middle,
                "best_seconds": min(spent),
                "gb_per_s": total / middle / 1e9,
                "over_memcpy": ratio,
            }
    return figures


@contextlib.contextmanager
def pool_master(wanted: bool) -> Iterator[str | None]:
    """A Mooncake master of its own; None when it does not start."""
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "pool.json"
        argv = [sys.executable, "-m", "trtllm_serve", "mooncake_master", "--protocol", "tcp", "--rpc_port", "0"]
        argv += ["--metrics_port", "0", "--run_dir", f"{folder}/run", "--pool_file", str(manifest)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with open(f"{folder}/master.log", "wb") as log:
            master = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)
        try:
            deadline = time.monotonic() + LIMIT
            while not manifest.exists() and master.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            yield f"file://{manifest}" if manifest.exists() else None
        finally:
            master.terminate()
            master.wait(20)


def run(cases: list[tuple[int, int]], names: list[str], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for size, count in cases:
        # A master for each block size: keys of one size must not be found by another.
        with (
            pool_master("pool" in names and (size, count) == RATIO_CASE) as pool,
            started_holder(size, count, names, pool) as hello,
            contextlib.closing(Case(size, count, hello, names, pool)) as case,
        ):
            figures = measure(case, rounds)
        rows.append({"block_bytes": size, "batch": count, "figures": figures})
        print(_line(rows[-1]), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    size = row["block_bytes"]
    label = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
    cells = []
    for name, figure in row["figures"].items():
        if isinstance(figure, str):
            cells.append(f"{name}: {figure}")
        else:
            cells.append(f"{name} {figure['gb_per_s']:.2f} ({1e3 * figure['seconds']:.2f} ms)")
    return f"{label:>8} x {row['batch']:<3}  " + "   ".join(cells)


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """NAME_over_memcpy at 64 x 1 MiB."""
    found: dict[str, float] = {}
    for row in rows:
        if (row["block_bytes"], row["batch"]) == RATIO_CASE:
            for name, figure in row["figures"].items():
                if not name.startswith("memcpy") and not isinstance(figure, str):
                    found[f"{name}_over_memcpy"] = round(figure["over_memcpy"], 3)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--transceivers", default="shm,nixl,mooncake,pool")
    parser.add_argument("--quick", action="store_true", help="two cases only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hold", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hold:
        size, count, names, pool = arguments.hold
        holder(int(size), int(count), names.split(","), pool or None)
        return 0
    names = arguments.transceivers.split(",")
    print("GB/s (ms a batch), medians of", arguments.rounds, "rounds")
    rows = run(QUICK if arguments.quick else CASES, names, arguments.rounds)
    found = ratios(rows)
    for name, ratio in found.items():
        target = TARGETS.get(name.removesuffix("_over_memcpy"))
        verdict = "" if target is None else f"  target {target:.2f}: {'met' if ratio >= target else 'MISSED'}"
        print(f"{name} {ratio:.2f}{verdict}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"rounds": arguments.rounds, "cases": rows, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
