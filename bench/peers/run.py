"""This project's router and its peers in one run: same workers, same load generator, rounds interleaved.

    python bench/peers/install.py
    python bench/peers/run.py [--rounds 3] [--seconds 2] [--routers ours-kv_cache_aware,smg-cache_aware]
                              [--growth 2,16,128,512] [--blocks 0,100000,1000000] [--json FILE] [--markdown FILE]

Every figure is the median of the rounds, in each of which every router is started anew and measured in turn. `direct`
is the load on a worker itself. Compare within one run only: CPU times read higher on a busy machine, whose load average
is recorded. Cases named by --urgent run under a real-time policy and feel little of it; a saturating one leaves the
machine nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import CASES, growth_with_blocks, growth_with_workers, measure
from prompts import write_bodies
from report import headline, markdown, summarise
from rig import ROOT, NotMeasured, build
from routers import TOKENIZER, Router, all_routers


def main() -> int:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes that were started
    build()
    chosen = choose(arguments.routers)
    results: dict[str, Any] = {
        "machine": machine(),
        "routers": {router.name: router.what for router in chosen} | {"direct": "no router: a worker itself"},
        "not_measured": {},
        "load_average": [],
    }
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as name:
        folder = Path(name)
        write_bodies(folder, load_tokenizer())
        rounds = run_rounds(chosen, arguments, folder, results)
        results["rounds"] = rounds
        results["summary"] = summarise(rounds)
        results["growth_workers"] = run_growth(chosen, arguments, folder, results)
        results["growth_blocks"] = run_blocks(chosen, arguments, folder, results)
    peers = [router.name for router in chosen if router.peer and router.cache_aware]
    results["headline"] = {
        router.name: headline(results["summary"], peers, router.name)
        for router in chosen
        if not router.peer and router.cache_aware
    }
    write(results, arguments)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each case")
    parser.add_argument(
        "--routers", default="", help="names with commas between, or cache_aware; all that are installed if left out"
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument(
        "--urgent", default="first_token", help="cases in which routers, workers and load go before all other work here"
    )
    parser.add_argument("--growth", default="", help="total workers, as 2,16,128,512: also measure growth with them")
    parser.add_argument("--blocks", default="", help="indexed blocks, as 0,1000000: also measure growth with them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def choose(names: str) -> list[Router]:
    known = {router.name: router for router in all_routers()}
    if names in ("", "cache_aware"):
        return [router for router in known.values() if router.installed and (router.cache_aware or not names)]
    unknown = set(names.split(",")) - known.keys()
    if unknown:
        raise SystemExit(f"unknown routers {sorted(unknown)}; known: {', '.join(known)}")
    missing = [name for name in names.split(",") if not known[name].installed]
    if missing:
        raise SystemExit(f"not installed: {', '.join(missing)}; see bench/peers/install.py")
    return [known[name] for name in names.split(",")]


def machine() -> dict[str, Any]:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return {
        "cpu": model.partition(":")[2].strip(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def load_tokenizer() -> Any:
    sys.path.insert(0, str(ROOT))
    from engine.checkpoint import resolve_model
    from openai_api.tokenizer import Tokenizer

    return Tokenizer.load(resolve_model(TOKENIZER))


def run_rounds(
    chosen: list[Router], arguments: argparse.Namespace, folder: Path, results: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    cases = arguments.cases.split(",")
    found: dict[str, list[dict[str, Any]]] = {"direct": []} | {router.name: [] for router in chosen}
    for number in range(arguments.rounds):
        shift = number * 3 % len(chosen)
        for router in [None, *chosen[shift:], *chosen[:shift]]:
            name = "direct" if router is None else router.name
            wanted = [case for case in cases if router is not None or case not in ("long_prompts", "affinity")]
            try:
                figures = measure(router, wanted, arguments.urgent.split(","), arguments.seconds, folder)
            except NotMeasured as problem:
                results["not_measured"][name] = str(problem)
                note(f"{name}: {problem}")
                continue
            figures["load"] = os.getloadavg()[0]
            found[name].append(figures)
            note(f"round {number + 1} {name}: " + brief(figures))
        results["load_average"].append(os.getloadavg()[0])
    return found


def run_growth(
    chosen: list[Router], arguments: argparse.Namespace, folder: Path, results: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for total in map(int, filter(None, arguments.growth.split(","))):
        for router in chosen:
            try:
                figures = growth_with_workers(router, total, "requests" in arguments.urgent, arguments.seconds, folder)
            except NotMeasured as problem:
                figures = {"problem": str(problem)}
            found.setdefault(router.name, {})[str(total)] = figures
            note(f"{total} workers, {router.name}: " + brief(figures))
    return found


def run_blocks(
    chosen: list[Router], arguments: argparse.Namespace, folder: Path, results: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    totals = [int(total) for total in arguments.blocks.split(",") if total]
    found: dict[str, dict[str, Any]] = {}
    for router in chosen:
        if totals and not router.peer and router.cache_aware:
            try:
                found[router.name] = growth_with_blocks(
                    router, totals, "requests" in arguments.urgent, arguments.seconds, folder
                )
            except NotMeasured as problem:
                results["not_measured"][f"{router.name}, blocks"] = str(problem)
            note(f"blocks, {router.name}: {found.get(router.name)}")
    return found


def brief(figures: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def write(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    table = markdown(results)
    loads = ", ".join(f"{load:.1f}" for load in results["load_average"])
    seen = results["machine"]
    top = f"{seen['cpu']}, {seen['cores']} cores, Python {seen['python']}, {seen['when']}; load average {loads}"
    top += f"; {arguments.rounds} rounds of {arguments.seconds:g} s.\n\n"
    print(top + table)
    print(json.dumps(results["headline"], indent=2))
    if arguments.markdown is not None:
        arguments.markdown.write_text(top + table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
