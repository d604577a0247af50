"""Processes, cores and CPU clocks: what every measurement of a router stands on.

The router under test has the last core that this process may use to itself; workers and load generator share the first
one. CPU time is that of the router's whole process tree, from idle until the last answer is in.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BIN = ROOT / ".bin" / "bench"
_SOURCES = {
    "peer_worker": (HERE / "worker.c", HERE / "connections.h"),
    "load_generator": (HERE.parent / "src" / "load_generator.c",),
}
CONNECTIONS = 16


class NotMeasured(Exception):
    """The router does not start or does not answer; the text says how."""


def build() -> None:
    BIN.mkdir(parents=True, exist_ok=True)
    for name, sources in _SOURCES.items():
        target = BIN / name
        if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime for source in sources):
            fresh = target.with_suffix(f".{os.getpid()}")  # the old one may be running
            subprocess.run(["gcc", "-O2", "-Wall", "-o", str(fresh), str(sources[0])], check=True)
            fresh.replace(target)


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that are free now."""
    for base in range(20000, 32000, max(count, 64)):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(base, base + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
                return base
            except OSError:
                continue
    raise NotMeasured("no free ports")


# ---------------------------------------------------------------- processes


def _on_core(last: bool) -> Callable[[], None]:
    cores = sorted(os.sched_getaffinity(0))
    return lambda: os.sched_setaffinity(0, {cores[-1 if last else 0]})


@contextlib.contextmanager
def child(
    argv: list[str], log: Path, last_core: bool, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process group of its own, ended with the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            stdout=output,
            stderr=output,
            env={**os.environ, **(env or {})},
            preexec_fn=_on_core(last_core),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        process.wait()


def family(pid: int) -> list[int]:
    """The process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def cpu_seconds(pids: list[int]) -> float:
    """All threads of these processes. The clock id is how Linux numbers another process's CPU clock."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += time.clock_gettime(~pid << 3 | 2)
    return total


@contextlib.contextmanager
def preferred(pids: list[int]) -> Iterator[None]:
    """These processes, and this one with what it starts, run as soon as they can, where that is permitted.

    For latencies: what is measured then sleeps most of the time, and would else be measured as waiting for whatever
    else the machine does.
    """

    def schedule(policy: int, priority: int) -> None:
        for pid in (os.getpid(), *pids):
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setscheduler(int(thread), policy, os.sched_param(priority))

    schedule(os.SCHED_RR, 1)
    try:
        yield
    finally:
        schedule(os.SCHED_OTHER, 0)


def pss_mib(pids: list[int]) -> float:
    """Memory, with shared pages counted in proportion."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


# ---------------------------------------------------------------- HTTP


def get(port: int, path: str) -> Any:
    """JSON of a GET."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return json.loads(answer.read() or b"null")


def wait_served(process: subprocess.Popen[bytes], port: int, log: Path, patience: float = 90.0) -> None:
    """Until a completion gets through. Raises NotMeasured."""
    body = b'{"model":"m","prompt":"hello there","max_tokens":1,"stream":false}'
    problem = "nothing listens"
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and process.poll() is None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except urllib.error.HTTPError as error:
            problem = f"{error.code} {error.read()[:200]!r}"
        except OSError as error:
            problem = str(error)
        time.sleep(0.2)
    raise NotMeasured(f"{problem}; its log ends: {log.read_text(errors='replace')[-600:]}")


# ---------------------------------------------------------------- load


class Load:
    """Load on one port, and the CPU that it costs the processes of `pid`."""

    def __init__(self, port: int, pid: int, bodies: Path) -> None:
        self.port, self.pid, self.bodies = port, pid, bodies
        self.errors: list[str] = []

    def run(
        self,
        bodies: str,
        seconds: float,
        connections: int = CONNECTIONS,
        rate: float | None = None,
        warm: float = 0.5,
    ) -> dict[str, Any]:
        """The load generator's figures; `cpu` in seconds, `cpu_us` per request. `rate` makes the loop open."""
        options = ["-c", str(connections)] + ([] if rate is None else ["-r", str(rate)])
        if warm:
            self._generate(bodies, [*options, "-d", str(warm)])
        pids = family(self.pid)
        before = cpu_seconds(pids)
        result = self._generate(bodies, [*options, "-d", str(seconds)])
        result["cpu"] = cpu_seconds(pids) - before
        result["cpu_us"] = result["cpu"] / max(1, result["done"]) * 1e6
        if result["errors"]:
            self.errors.append(f"{bodies}: {result['errors']} errors, {result['error']}")
        return result

    def _generate(self, bodies: str, options: list[str]) -> dict[str, Any]:
        argv = [str(BIN / "load_generator"), "-p", str(self.port), "-b", str(self.bodies / f"{bodies}.jsonl"), *options]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, preexec_fn=_on_core(last=False))
        try:
            figures: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise NotMeasured(f"load generator: {done.returncode} {done.stderr[-300:]}") from None
        return figures
