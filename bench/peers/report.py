"""Medians over the rounds, and the tables."""

from __future__ import annotations

import statistics
from typing import Any

Rounds = list[dict[str, Any]]
STICKS = 0.9  # affinity above which a policy is taken to see prefixes
_COLUMNS = (
    ("CPU µs a request", "cpu_us", 0),
    ("requests/s", "per_second", 0),
    ("CPU µs a chunk, saturated", "chunk_cpu_us", 1),
    ("chunks/s", "chunks_per_second", 0),
    ("added TTFT p50 µs", "added_ttft_p50_us", 0),
    ("added TTFT p99 µs", "added_ttft_p99_us", 0),
    ("8k CPU ms", "long_8k_cpu_ms", 2),
    ("64k CPU ms", "long_64k_cpu_ms", 2),
    ("affinity", "affinity", 2),
    ("PSS MiB", "pss_mib", 0),
)


def summarise(rounds: dict[str, Rounds]) -> dict[str, dict[str, Any]]:
    """{router: {figure: median}}. Added latency is against the worker itself in the same round."""
    for name, found in rounds.items():
        for number, figures in enumerate(found):
            if name != "direct" and "ttft_p50_us" in figures and number < len(rounds.get("direct", [])):
                for quantile in ("p50", "p99"):
                    alone = rounds["direct"][number][f"ttft_{quantile}_us"]
                    figures[f"added_ttft_{quantile}_us"] = figures[f"ttft_{quantile}_us"] - alone
    return {name: _medians(found) for name, found in rounds.items() if found}


def _medians(found: Rounds) -> dict[str, Any]:
    names = {name for figures in found for name in figures if name != "errors"}
    medians: dict[str, Any] = {
        name: statistics.median(figures[name] for figures in found if name in figures) for name in sorted(names)
    }
    medians["rounds"] = len(found)
    medians["errors"] = [error for figures in found for error in figures["errors"]]
    return medians


def headline(summary: dict[str, dict[str, Any]], cache_aware_peers: list[str], ours: str) -> dict[str, Any]:
    """The figures that the router is judged by. `ours` is the policy with exact tokens. A *sticking* peer is one whose
    prompts really went to where their prefix was: not every router's cache-aware policy reads every kind of request."""
    mine = summary.get(ours, {})
    peers = {name: summary[name] for name in cache_aware_peers if name in summary and not summary[name]["errors"]}
    costs = {name: figures["cpu_us"] for name, figures in peers.items() if "cpu_us" in figures}
    best = min(costs, key=costs.__getitem__, default=None)
    sticking = [cost for name, cost in costs.items() if peers[name].get("affinity", 0.0) > STICKS]
    latencies = [figures["added_ttft_p50_us"] for figures in peers.values() if "added_ttft_p50_us" in figures]
    return {
        "policy": ours,
        "kv_aware_cpu_us": mine.get("cpu_us"),
        "best_peer": best,
        "best_peer_cpu_us": costs[best] if best else None,
        "cpu_ratio": mine["cpu_us"] / costs[best] if best and "cpu_us" in mine else None,
        "best_sticking_peer_cpu_us": min(sticking, default=None),
        "chunk_cpu_us": mine.get("chunk_cpu_us"),
        "long_64k_cpu_ms": mine.get("long_64k_cpu_ms"),
        "added_ttft_p50_us": mine.get("added_ttft_p50_us"),
        "best_peer_added_ttft_p50_us": min(latencies, default=None),
    }


def markdown(results: dict[str, Any]) -> str:
    what = results["routers"]
    lines = ["| router | " + " | ".join(title for title, _, _ in _COLUMNS) + " | errors |"]
    lines.append("|---" * (len(_COLUMNS) + 2) + "|")
    ranked = sorted(results["summary"].items(), key=lambda item: item[1].get("cpu_us", 0.0))
    for name, figures in ranked:
        cells = [_cell(figures.get(key), digits) for _, key, digits in _COLUMNS]
        lines.append(f"| {what.get(name, name)} | " + " | ".join(cells) + f" | {len(figures['errors'])} |")
    for title, key in (("Workers", "growth_workers"), ("Indexed blocks", "growth_blocks")):
        lines += _growth(title, results.get(key, {}), what)
    for name, problem in results["not_measured"].items():
        lines.append(f"\nNot measured: {name}: {problem}")
    return "\n".join(lines) + "\n"


def _growth(title: str, found: dict[str, dict[str, Any]], what: dict[str, str]) -> list[str]:
    if not found:
        return []
    sizes = sorted({size for by_size in found.values() for size in by_size}, key=int)
    lines = ["", f"{title}: CPU µs a request (PSS MiB; share of a core when idle)", ""]
    lines += [f"| router | {' | '.join(sizes)} | growth |", "|---" * (len(sizes) + 2) + "|"]
    for name, by_size in found.items():
        cells = [_growth_cell(by_size.get(size)) for size in sizes]
        costs = [by_size[size]["cpu_us"] for size in sizes if "cpu_us" in by_size.get(size, {})]
        growth = f"{costs[-1] / costs[0]:.2f}×" if len(costs) > 1 else ""
        lines.append(f"| {what.get(name, name)} | {' | '.join(cells)} | {growth} |")
    return lines


def _growth_cell(figures: dict[str, Any] | None) -> str:
    if not figures or "cpu_us" not in figures:
        return (figures or {}).get("problem", "")[:80]
    idle = f"; {figures['idle_cpu']:.0%}" if "idle_cpu" in figures else ""
    ingest = f"; ingest {figures['ingest_us_per_block']:.2f} µs a block" if "ingest_us_per_block" in figures else ""
    return f"{figures['cpu_us']:.0f} ({figures['pss_mib']:.0f}{idle}{ingest})"


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
