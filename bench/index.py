"""The router's block index by itself: a lookup, taking in events, and its size.

    python bench/index.py [--workers 7000] [--blocks 1000000] [--json FILE]

Every worker holds one of `--families` shared beginnings (system prompts) and then a chain of its own. A lookup is a
prompt that one worker has whole: shared blocks first, so that many owners are dropped on the way. Ingest is batches of
`--batch` stored keys, once as decoded batches and once from the lines that workers send. Ingest is in CPU time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARED_BLOCKS = 10


def main() -> int:
    # Instead of this folder, where another script is named as a package is.
    sys.path[:1] = [str(Path(__file__).resolve().parent.parent)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=7000)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="of all workers together")
    parser.add_argument("--families", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="keys of an event batch")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    figures = measure(arguments.workers, arguments.blocks, arguments.families, arguments.batch)
    for name, value in figures.items():
        print(f"{name:28s}{value:>14,.2f}" if isinstance(value, float) else f"{name:28s}{value:>14,}")
    print(f"load average {load:.1f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures | {"load_average": load}, indent=2) + "\n")
    return 0


def measure(num_workers: int, num_blocks: int, families: int, batch_size: int) -> dict[str, Any]:
    import msgspec

    from kvstore.protocol import KvEvent, KvEventBatch
    from router.index import BlockIndex

    rng = random.Random(1)
    own = max(1, num_blocks // num_workers - SHARED_BLOCKS)
    shared = [[rng.randbytes(16) for _ in range(SHARED_BLOCKS)] for _ in range(families)]
    chains = [shared[place % families] + [rng.randbytes(16) for _ in range(own)] for place in range(num_workers)]
    batches = [batches_of(KvEventBatch, KvEvent, f"w{place}", chain, batch_size) for place, chain in enumerate(chains)]
    gc.collect()
    gc.freeze()  # as the router does with what lives long

    before = resident_bytes()
    index = BlockIndex()
    attaching, attached = cpu(lambda: [index.attach(f"w{place}") for place in range(num_workers)])
    total = sum(map(len, chains))
    ingest, _ = cpu(lambda: take_in(index, attached, batches))
    entries, size = len(index), resident_bytes() - before

    encode = msgspec.json.encode
    lines = [encode(batch) for several in batches[: num_workers // 10] for batch in several]
    decoder = msgspec.json.Decoder(KvEventBatch)
    keys_in_lines = sum(map(len, chains[: num_workers // 10]))
    decoding, _ = cpu(lambda: [decoder.decode(line) for line in lines])

    lookups, misses = lookup_times(index, chains, rng)
    removing, _ = cpu(lambda: [index.detach(blocks) for blocks in attached[: num_workers // 10]])
    return {
        "workers": num_workers,
        "index_blocks": entries,
        "keys_ingested": total,
        "lookup_blocks": SHARED_BLOCKS + own,
        "lookup_us_p50": statistics.median(lookups) * 1e6,
        "lookup_us_p99": sorted(lookups)[int(0.99 * len(lookups))] * 1e6,
        "miss_us_p50": statistics.median(misses) * 1e6,
        "ingest_keys_per_second": total / ingest,
        "ingest_with_decoding": total / (ingest + decoding * total / max(1, keys_in_lines)),
        "bytes_per_key": size / total,
        "attach_us_each": attaching / num_workers * 1e6,
        "detach_us_each": removing / max(1, num_workers // 10) * 1e6,
    }


def batches_of(batch: Any, event: Any, incarnation: str, chain: list[bytes], size: int) -> list[Any]:
    """A snapshot first, as a stream opens with."""
    found = [batch(incarnation, 0, [event(cleared=True)])]
    for start in range(0, len(chain), size):
        found.append(batch(incarnation, len(found), [event(stored=chain[start : start + size])]))
    return found


def take_in(index: Any, attached: list[Any], batches: list[list[Any]]) -> None:
    for blocks, several in zip(attached, batches, strict=True):
        for batch in several:
            index.apply(blocks, batch)


def lookup_times(index: Any, chains: list[list[bytes]], rng: random.Random) -> tuple[list[float], list[float]]:
    """Seconds of each lookup: of prompts that a worker has whole, and of prompts that nobody has."""
    hits, misses = [], []
    for _ in range(2000):
        chain = rng.choice(chains)
        foreign = [rng.randbytes(16) for _ in chain]
        for keys, times in ((chain, hits), (foreign, misses)):
            started = time.perf_counter()
            index.match(keys)
            times.append(time.perf_counter() - started)
    return hits, misses


def cpu(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
