"""How well a routing policy places requests: request traces played against simulated context workers.

    python bench/routing_quality.py TRACE.jsonl [...] [--workers 8] [--blocks 2000] [--speed 1,1.5] [--json FILE]

A trace has one JSON object a line: timestamp (ms), input_length (tokens) and hash_ids, one per 512 tokens, equal for
equal prefixes (the form of the Mooncake traces). The policies are the router's own objects with its own index; each
worker's prefix cache is the engine's own BlockPool, `--blocks` large and the same for all policies; its changes reach
the index as event batches, `--event_delay` later. Time is virtual: a worker prefills one prompt after another, each in
`overhead` + uncached tokens / `rate`.

hit rate   cached tokens by all prompt tokens, as the workers see it when they start on a prompt
goodput    requests whose first token comes at most `--slack` seconds later than it would alone with an empty cache,
           by all requests offered

References, with the same memory in total:
  bound          no placement and no eviction order does better: all memory in one cache, blocks given up with knowledge
                 of the whole future; says nothing of time
  oracle         what placement can win: all memory in one cache with the workers' own eviction order (least recently
                 used), one queue, and whichever worker is free first
  all_knowing    least time to the first token with the workers' true caches and queues known at every moment, one
                 request at a time and without the future: an achievable placement
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main() -> int:
    # Instead of this folder, where another script is named as a package is.
    sys.path[:1] = [str(Path(__file__).resolve().parent.parent)]
    from bench.routing.placements import REFERENCES, compare
    from bench.routing.simulation import Setting, read_trace
    from router.config import ROUTER_TYPES

    arguments = parse_arguments(list(ROUTER_TYPES), Setting())
    kinds = [*arguments.policies.split(","), *REFERENCES]
    results: list[dict[str, Any]] = []
    for path, blocks, speed in itertools.product(
        arguments.traces, map(int, arguments.blocks.split(",")), map(float, arguments.speed.split(","))
    ):
        setting = Setting(
            workers=arguments.workers,
            blocks=blocks,
            rate=arguments.rate,
            slack=arguments.slack,
            event_delay=arguments.event_delay,
            tokens_per_block=arguments.tokens_per_block,
        )
        started = time.perf_counter()
        requests = read_trace(path, speed, arguments.limit)
        found = compare(requests, setting, kinds)
        tokens, seconds = sum(request.tokens for request in requests), requests[-1].arrival or 1.0
        load = tokens / seconds / (setting.rate * setting.workers)
        print(
            f"\n{path.name} at speed {speed:g}: {len(requests)} requests, {setting.workers} workers of {blocks} blocks "
            f"and {setting.rate:g} tokens/s, load without any cache {load:.2f}"
            f" ({time.perf_counter() - started:.0f} s, load average {os.getloadavg()[0]:.1f})\n"
        )
        print("\n".join(table(found)), flush=True)
        entry = {"trace": path.name, "speed": speed, "requests": len(requests), "offered_load": load}
        results.append(entry | {"setting": vars(setting), "policies": found})
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def parse_arguments(policies: list[str], default: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--policies", default=",".join(policies), help="router types; all of this build if left out")
    parser.add_argument("--workers", type=int, default=default.workers)
    parser.add_argument("--blocks", default=str(default.blocks), help="of 512 tokens in a cache; several: a,b")
    parser.add_argument("--speed", default="1", help="play the trace faster; several: a,b")
    parser.add_argument("--rate", type=float, default=default.rate, help="tokens a second that a worker prefills")
    parser.add_argument("--slack", type=float, default=default.slack, help="seconds")
    parser.add_argument("--event_delay", type=float, default=default.event_delay, help="seconds")
    parser.add_argument(
        "--tokens_per_block",
        type=int,
        default=default.tokens_per_block,
        help="of the workers that the policies' weights are meant for; the trace's own blocks are of 512",
    )
    parser.add_argument("--limit", type=int, help="only the first requests of a trace")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def table(found: dict[str, dict[str, float]]) -> Iterator[str]:
    yield "| policy | hit rate | of the oracle's | goodput | TTFT p50 s | p99 s | most requests on one worker, × mean |"
    yield "|---" * 7 + "|"
    for kind, figures in found.items():
        cells = [f"{figures['hit_rate']:.4f}", f"{figures['of_oracle']:.3f}"]
        for name, digits in (("goodput", 4), ("ttft_p50", 2), ("ttft_p99", 2), ("most_requests", 2)):
            cells.append(f"{figures[name]:.{digits}f}" if name in figures else "")
        yield f"| {kind} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
