"""What is measured of one router: each function starts it anew and returns figures by name."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prompts import AFFINITY_PROMPTS
from rig import BIN, Load, NotMeasured, child, cpu_seconds, family, free_ports, get, preferred, pss_mib, wait_served
from routers import Place, Router

PACED_US = 4000  # between the tokens of one stream
SATURATING = 256  # streams: 64,000 tokens a second are offered
LATENCY_RATE = 50.0  # requests a second
SETTLING = {128: 3.0, 512: 20.0}  # seconds: large fleets go on registering after the first answer
Figures = dict[str, Any]


@dataclass(frozen=True)
class Session:
    """A router that serves, with its workers."""

    load: Load
    control: int  # port of a worker
    worker_pid: int
    pid: int
    port: int
    prefill_workers: int

    def pace(self, microseconds: int) -> None:
        get(self.control, f"/_ctl?itl_us={microseconds}")

    def preferred(self) -> contextlib.AbstractContextManager[None]:
        return preferred([*family(self.pid), self.worker_pid])

    @property
    def memory(self) -> float:
        return pss_mib(family(self.pid))


@contextlib.contextmanager
def session(router: Router | None, workers: int, folder: Path) -> Iterator[Session]:
    """`workers` of each role. Without a router the load goes to a worker itself."""
    first = free_ports(2 * workers + 2)
    ports = list(range(first, first + 2 * workers))
    place = Place(ports[-1] + 1, ports[-1] + 2, ports[:workers], ports[workers:], folder)
    with contextlib.ExitStack() as stack:
        worker_log, log = folder / "worker.log", folder / "router.log"
        argv = [str(BIN / "peer_worker"), str(first), str(2 * workers), str(workers)]
        worker = stack.enter_context(child(argv, worker_log, last_core=False))
        wait_served(worker, first, worker_log)
        if router is None:
            yield Session(Load(first, worker.pid, folder), first, worker.pid, worker.pid, first, workers)
            return
        process = stack.enter_context(child(router.command(place), log, last_core=True, env=router.env))
        wait_served(process, place.port, log)
        time.sleep(0.5)
        yield Session(Load(place.port, process.pid, folder), first, worker.pid, process.pid, place.port, workers)
        if process.poll() is not None:
            raise NotMeasured(f"it ended during the measurement: {log.read_text(errors='replace')[-600:]}")


# ---------------------------------------------------------------- cases


def requests(found: Session, seconds: float) -> Figures:
    run = found.load.run("100-plain", seconds)
    return {"cpu_us": run["cpu_us"], "per_second": run["per_second"]}


def chunks(found: Session, seconds: float) -> Figures:
    """`chunk_cpu_us`: all CPU of saturated streams, requests included, by chunk relayed."""
    found.pace(PACED_US)
    run = found.load.run("100-stream64", seconds, connections=SATURATING)
    found.pace(0)
    tokens = max(1, run["chunks"])
    return {
        "chunk_cpu_us": run["cpu"] / tokens * 1e6,
        "chunks_per_second": tokens / run["seconds"],
        "chunk_delay_p99_us": run["one_way_us"]["p99"],
    }


def first_token(found: Session, seconds: float) -> Figures:
    run = found.load.run("100-stream1", max(3.0, seconds), connections=32, rate=LATENCY_RATE)
    return {"ttft_p50_us": run["first_byte_us"]["p50"], "ttft_p99_us": run["first_byte_us"]["p99"]}


def long_prompts(found: Session, seconds: float) -> Figures:
    figures: Figures = {}
    for name in ("8k", "64k"):
        run = found.load.run(f"{name}-plain", seconds, connections=4, warm=0.3)
        figures[f"long_{name}_cpu_ms"] = run["cpu_us"] / 1000
        figures[f"long_{name}_p50_ms"] = run["latency_us"]["p50"] / 1000
    return figures


def affinity(found: Session, seconds: float) -> Figures:
    """Whether prompts stick to the context worker that has their prefix: 1 if all requests of a prompt go to one, and
    1 / workers if the prompt does not matter. Of several prompts one after another, the least."""
    shares = []
    for number in range(AFFINITY_PROMPTS):
        before = get(found.control, "/_stat")["by_port"]
        found.load.run(f"100-one{number}", 0.2, connections=1, warm=0)
        after = get(found.control, "/_stat")["by_port"]
        counts = [now - then for now, then in zip(after, before, strict=True)][: found.prefill_workers]
        shares.append(max(counts) / max(1, sum(counts)))
    return {"affinity": min(shares)}


CASES: dict[str, Callable[[Session, float], Figures]] = {
    "requests": requests,
    "chunks": chunks,
    "first_token": first_token,
    "long_prompts": long_prompts,
    "affinity": affinity,
}


def measure(router: Router | None, cases: list[str], urgent: list[str], seconds: float, folder: Path) -> Figures:
    """`urgent` cases run before all else that the machine has to do."""
    with session(router, 2, folder) as found:
        figures: Figures = {}
        for case in cases:
            with found.preferred() if case in urgent else contextlib.nullcontext():
                figures |= CASES[case](found, seconds)
        figures["pss_mib"] = found.memory
        figures["errors"] = found.load.errors
    return figures


# ---------------------------------------------------------------- growth


def growth_with_workers(router: Router, total: int, urgent: bool, seconds: float, folder: Path) -> Figures:
    """`total` workers, half of each role. `idle_cpu` is the share of a core that the router uses without a request."""
    with session(router, total // 2, folder) as found:
        time.sleep(SETTLING.get(total, 0.5))
        pids = family(found.pid)
        before, started = cpu_seconds(pids), time.monotonic()
        time.sleep(5.5)  # longer than the interval of health checks
        idle = (cpu_seconds(pids) - before) / (time.monotonic() - started)
        with found.preferred() if urgent else contextlib.nullcontext():
            runs = [found.load.run("100-plain", seconds) for _ in range(2)]
        cpu = min(run["cpu_us"] for run in runs)
        used = get(found.control, "/_stat")["ports_used"]
        return {
            "cpu_us": cpu,
            "pss_mib": found.memory,
            "idle_cpu": idle,
            "workers_used": used,
            "errors": found.load.errors,
        }


def growth_with_blocks(
    router: Router, totals: list[int], urgent: bool, seconds: float, folder: Path
) -> dict[str, Figures]:
    """CPU of a request by the number of blocks in the index, which the workers' events fill."""
    found_at: dict[str, Figures] = {}
    with session(router, 2, folder) as found:
        indexed = 0
        for total in totals:
            figures: Figures = {}
            if total > indexed:
                pids = family(found.pid)
                before = cpu_seconds(pids)
                get(found.control, f"/_ctl?store={total - indexed}")
                _wait_indexed(found.port, total)
                figures["ingest_us_per_block"] = (cpu_seconds(pids) - before) / (total - indexed) * 1e6
                indexed = total
            with found.preferred() if urgent else contextlib.nullcontext():
                runs = [found.load.run("100-plain", seconds) for _ in range(2)]
            figures |= {"cpu_us": min(run["cpu_us"] for run in runs), "pss_mib": found.memory}
            found_at[str(total)] = figures
    return found_at


def _wait_indexed(port: int, total: int) -> None:
    deadline = time.monotonic() + 60
    while (blocks := cluster_info(port)["index_blocks"]) < total:
        if time.monotonic() > deadline:
            raise NotMeasured(f"the index has {blocks} of {total} blocks after a minute")
        time.sleep(0.2)


def cluster_info(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/cluster_info", timeout=30) as answer:
        info: dict[str, Any] = json.loads(answer.read())
    return info
