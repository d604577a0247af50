"""What the pool moves: GB/s of put and get through the whole PoolClient, beside memcpy in the same rounds.

    python bench/pool.py [--rounds 15] [--json FILE] [--sizes 65536,262144,1048576,2097152] [--count 64]

One master, two store clients with agents of their own, as two engines of one host have: one puts, the other gets.
Rounds are interleaved (memcpy, put, get), each with keys of its own. `staged` is the same through the vendor's TCP
transport, which clients of different hosts use. Figures are medians of the rounds, and the best round, in 1e9 bytes a
second; ratios are medians of the rounds' own. Other load of the machine shows in how far median and best are apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "mooncake")]

from mooncake_pool import wire  # noqa: E402
from mooncake_pool.manifest import read_manifest  # noqa: E402
from mooncake_pool.remote import PoolClient, key_prefix  # noqa: E402
from mooncake_pool.store_config import EffectiveSettings  # noqa: E402

MIB = 1024 * 1024
COMMAND = [sys.executable, "-c", "from trtllm_serve.mooncake import mooncake_master as main; main()"]
SETTLE_SECONDS = 0.02
WARM_ROUNDS = 8
Row = dict[str, list[float]]


@contextlib.contextmanager
def master(folder: Path) -> Iterator[str]:
    """Reference of a running pool."""
    pool_file = folder / "pool.json"
    options = ["--protocol=tcp", "--rpc_port=0", "--metrics_port=0", f"--run_dir={folder}", f"--pool_file={pool_file}"]
    process = subprocess.Popen([*COMMAND, *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not pool_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the pool's master did not start")
            time.sleep(0.05)
        read_manifest(pool_file)
        yield f"file://{pool_file}"
    finally:
        process.terminate()
        process.wait(20)


@contextlib.contextmanager
def clients(reference: str, block_bytes: int, segment: int) -> Iterator[tuple[PoolClient, PoolClient]]:
    config = EffectiveSettings(pool=reference, segment_size=segment)
    prefix = key_prefix("bench", 32, block_bytes, str(time.time_ns()))
    pair = [PoolClient.start(config, prefix, block_bytes, name) for name in ("putter", "getter")]
    try:
        deadline = time.monotonic() + 30
        while any(client.state() != "up" for client in pair):
            if time.monotonic() > deadline:
                raise SystemExit(f"no pool: {[client.state() for client in pair]}")
            time.sleep(0.05)
        yield pair[0], pair[1]
    finally:
        for client in pair:
            client.close()


def timed(work: Callable[[], Any]) -> float:
    time.sleep(SETTLE_SECONDS)
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure(reference: str, block_bytes: int, count: int, rounds: int, staged: bool) -> Row:
    """GB/s of each round by path."""
    total = block_bytes * count
    source = np.random.default_rng(1).integers(0, 256, total, dtype=np.uint8)
    target = np.zeros_like(source)
    blocks = [memoryview(source)[i * block_bytes : (i + 1) * block_bytes] for i in range(count)]
    into = [memoryview(target)[i * block_bytes : (i + 1) * block_bytes] for i in range(count)]
    segment = max(64 * MIB, 2 * total)
    found: Row = {"memcpy": [], "put": [], "get": []}
    with clients(reference, block_bytes, segment) as (putter, getter):
        if staged:
            for client in (putter, getter):
                client._access.maps.close()  # as on hosts that share no memory
        for number in range(WARM_ROUNDS + rounds):  # first the segments get mapped and their pages populated
            keys = [(number << 32 | i).to_bytes(16, "big") for i in range(count)]
            target[:] = 0
            seconds = {"put": timed(lambda: expect(putter.put(keys, blocks, 30.0), count))}  # noqa: B023
            seconds["get"] = timed(lambda: expect(getter.get(keys, into, 30.0), count))  # noqa: B023
            if not np.array_equal(source, target):
                raise SystemExit("what was read is not what was stored")
            seconds["memcpy"] = timed(lambda: np.copyto(target, source))
            forget(putter, keys)
            if number >= WARM_ROUNDS:
                for path, taken in seconds.items():
                    found[path].append(total / taken / 1e9)
    return found


def forget(client: PoolClient, keys: list[bytes]) -> None:
    """Room for the next round in the same memory, as evictions give it in a pool that is full."""
    assert client._access.link is not None
    client._access.link.tell(wire.Forget(keys))


def expect(done: int, count: int) -> None:
    if done != count:
        raise SystemExit(f"{done} of {count} blocks")


def summary(size: int, count: int, row: Row, path: str) -> dict[str, Any]:
    result: dict[str, Any] = {"block_bytes": size, "count": count, "path": path}
    for name, values in row.items():
        result[name] = round(statistics.median(values), 3)
        result[f"{name}_best"] = round(max(values), 3)
    for name in ("put", "get"):
        ratios = [value / copied for value, copied in zip(row[name], row["memcpy"], strict=True)]
        result[f"{name}_over_memcpy"] = round(statistics.median(ratios), 3)
        result[f"{name}_over_memcpy_best"] = round(result[f"{name}_best"] / result["memcpy_best"], 3)
    return result


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['block_bytes'] // 1024:>6} KiB x {row['count']:<3} {row['path']:<7} memcpy {row['memcpy']:6.2f}   "
        f"put {row['put']:6.2f} ({row['put_over_memcpy']:.2f}, best {row['put_best']:.2f})   "
        f"get {row['get']:6.2f} ({row['get_over_memcpy']:.2f}, best {row['get_best']:.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--count", type=int, default=64, help="blocks a call")
    parser.add_argument("--sizes", default="65536,262144,1048576,2097152", help="block sizes in bytes")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, master(Path(folder)) as reference:
        for size in map(int, arguments.sizes.split(",")):
            for staged in (False, True):
                rounds = max(3, arguments.rounds // 3) if staged else arguments.rounds
                row = measure(reference, size, arguments.count, rounds, staged)
                rows.append(summary(size, arguments.count, row, "staged" if staged else "mapped"))
                show(rows[-1])
    if arguments.json:
        chosen = next((r for r in rows if r["block_bytes"] == MIB and r["path"] == "mapped"), None)
        content = {"rows": rows, "load": os.getloadavg()[0], "cores": os.cpu_count()}
        if chosen is not None:
            content["pool_over_memcpy"] = min(chosen["put_over_memcpy"], chosen["get_over_memcpy"])
            content["pool_over_memcpy_best"] = min(chosen["put_over_memcpy_best"], chosen["get_over_memcpy_best"])
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
