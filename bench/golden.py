"""The golden property on the bundled model: the same answers however a request is served.

    python bench/golden.py --requests 2000 --seed 1

Serves random requests over all options alone, then batched, in small chunks, with reused blocks, preempted, over a
hand-off, and as a stream; prints how many answers differ, which is 0 for each.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PART = 100  # requests checked together


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=None, help="of the requests; drawn anew if left out")
    arguments = parser.parse_args()
    seed = random.randrange(2**31) if arguments.seed is None else arguments.seed
    # Instead of this folder, where another script is named as a package is.
    sys.path[:1] = [str(_ROOT), str(_ROOT / "tests" / "support")]
    from golden_rig import check

    print(f"seed {seed}, {arguments.requests} requests", flush=True)
    started = time.monotonic()
    totals: dict[str, int] = {}
    ties = 0
    for part, at in enumerate(range(0, arguments.requests, _PART)):
        count = min(_PART, arguments.requests - at)
        differences, left_out = check(count, seed + part)
        ties += left_out
        for way, found in differences.items():
            totals[way] = totals.get(way, 0) + len(found)
            for text in found:
                print(f"{way}: {text}", flush=True)
    print(", ".join(f"{way} {number}" for way, number in totals.items()), "answers differ")
    print(f"{ties} left out: their draw fell within float32's rounding of the border between two tokens")
    print(f"{time.monotonic() - started:.0f} s")
    return int(any(totals.values()))


if __name__ == "__main__":
    sys.exit(main())
