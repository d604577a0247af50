"""What the router costs: CPU a two-hop request, CPU a streamed chunk, added first-token latency.

    python bench/router.py [--runs 3] [--seconds 3] [--workers 2] [--json FILE [--policy kv_cache_aware]]

Builds two C programs into .bin/bench: a worker that costs next to nothing, and a load generator. The router runs as the
real command on one core, with round_robin; workers and load generator share another core. CPU is the router process's
own clock, idle to drained; each figure is the median of the runs. `direct` is the same load on a worker itself.

With --json the kv-aware router is measured too, beside every installed peer's cache-aware policy (bench/peers/), and
the file has kv_aware_cpu_us, best_peer_cpu_us, chunk_cpu_us, long_64k_cpu_ms and added_ttft_p50_us.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BIN = HERE.parent / ".bin" / "bench"
TARGET_US = 150.0
CONNECTIONS = 16
STREAM_TOKENS = 64
_WORDS = ["apple", "river", "stone", "house", "tree", "blue", "green", "word", "token", "prompt"]


def build() -> None:
    BIN.mkdir(parents=True, exist_ok=True)
    for name in ("fake_worker", "load_generator"):
        source, target = HERE / "src" / f"{name}.c", BIN / name
        if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
            subprocess.run(["gcc", "-O2", "-Wall", "-o", str(target), str(source)], check=True)


def write_bodies(path: Path, **fields: Any) -> None:
    """512 prompts of 100 words, one request a line."""
    rng = random.Random(1)
    lines = [
        json.dumps({"model": "m", "prompt": " ".join(rng.choices(_WORDS, k=100)), "temperature": 0, **fields})
        for _ in range(512)
    ]
    path.write_text("".join(line.replace(": ", ":").replace(", ", ",") + "\n" for line in lines))


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that are free now."""
    for base in range(20000, 32000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(base, base + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
                return base
            except OSError:
                continue
    raise SystemExit("no free ports")


@contextlib.contextmanager
def child(argv: list[str], core: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process on one core (of those this process may use), ended with the block."""
    allowed = sorted(os.sched_getaffinity(0))
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output)
    os.sched_setaffinity(process.pid, {allowed[core % len(allowed)]})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"the process on port {port} does not serve:\n{log.read_text()[-2000:]}")


class Load:
    """Runs of the load generator against one port, whose process's CPU is read."""

    def __init__(self, port: int, pid: int, directory: Path, runs: int, seconds: float) -> None:
        self.port, self.pid, self.directory, self.runs, self.seconds = port, pid, directory, runs, seconds

    def run(self, bodies: str, connections: int = CONNECTIONS, rate: float | None = None) -> list[dict[str, Any]]:
        argv = [str(BIN / "load_generator"), "-p", str(self.port), "-b", str(self.directory / bodies)]
        argv += ["-c", str(connections), "-d", str(self.seconds), "-w", "0.5", "-P", str(self.pid)]
        argv += [] if rate is None else ["-r", str(rate)]
        allowed = sorted(os.sched_getaffinity(0))
        results = []
        for _ in range(self.runs):
            done = subprocess.run(
                argv, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {allowed[0]})
            )
            if done.returncode:
                raise SystemExit(f"load generator failed: {done.stdout}{done.stderr}")
            results.append(json.loads(done.stdout))
        return results


def measure(load: Load, control: int) -> dict[str, float]:
    """Microseconds. `control` is a fake worker's port."""
    plain = load.run("plain.jsonl")
    one = load.run("stream1.jsonl")
    set_pace(control, 4000)
    paced = load.run("stream64.jsonl")
    set_pace(control, 0)
    quiet = load.run("stream1.jsonl", connections=32, rate=50)
    per_stream = median_us(paced, "done")
    return {
        "cpu_us_per_request": median_us(plain, "done"),
        "requests_per_second": statistics.median(run["per_second"] for run in plain),
        "cpu_us_per_chunk": (per_stream - median_us(one, "done")) / (STREAM_TOKENS - 1),
        "first_token_us_p50": statistics.median(run["first_byte_us"]["p50"] for run in quiet),
        "first_token_us_p99": statistics.median(run["first_byte_us"]["p99"] for run in quiet),
        "token_one_way_us_p50": statistics.median(run["one_way_us"]["p50"] for run in paced),
    }


def median_us(runs: list[dict[str, Any]], per: str) -> float:
    return float(statistics.median(run["cpu"] / run[per] * 1e6 for run in runs))


def set_pace(port: int, microseconds: int) -> None:
    urllib.request.urlopen(f"http://127.0.0.1:{port}/_ctl?itl_us={microseconds}", timeout=5).close()


def run(runs: int, seconds: float, workers: int) -> dict[str, dict[str, float]]:
    build()
    ports = free_ports(2 * workers + 1)
    router_port, first = ports, ports + 1
    with tempfile.TemporaryDirectory(prefix="bench-router-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        write_bodies(directory / "plain.jsonl", max_tokens=1)
        write_bodies(directory / "stream1.jsonl", max_tokens=1, stream=True)
        write_bodies(directory / "stream64.jsonl", max_tokens=STREAM_TOKENS, stream=True)
        fake_log, router_log = directory / "fake.log", directory / "router.log"
        fake = stack.enter_context(child([str(BIN / "fake_worker"), str(first), str(2 * workers)], 0, fake_log))
        wait_ready(fake, first, fake_log)
        config = directory / "disagg.yaml"
        config.write_text(json.dumps(disagg_config(router_port, first, workers)))
        argv = [sys.executable, "-m", "trtllm_serve", "disaggregated", "-c", str(config), "-l", "warning"]
        router = stack.enter_context(child(argv, 1, router_log))
        wait_ready(router, router_port, router_log)
        return {
            "direct": measure(Load(first, fake.pid, directory, runs, seconds), first),
            "router": measure(Load(router_port, router.pid, directory, runs, seconds), first),
        }


def disagg_config(port: int, first: int, workers: int) -> dict[str, Any]:
    urls = [f"127.0.0.1:{first + place}" for place in range(2 * workers)]
    return {
        "hostname": "127.0.0.1",
        "port": port,
        "context_servers": {"num_instances": workers, "urls": urls[:workers]},
        "generation_servers": {"num_instances": workers, "urls": urls[workers:]},
    }


def beside_peers(runs: int, seconds: float, policy: str) -> dict[str, Any]:
    """Figures of the kv-aware router and of the cheapest peer, from one run of both; None where no peer is there."""
    with tempfile.TemporaryDirectory(prefix="bench-router-") as name:
        path = Path(name) / "peers.json"
        argv = [sys.executable, str(HERE / "peers" / "run.py"), "--routers", "cache_aware", "--json", str(path)]
        subprocess.run([*argv, "--rounds", str(runs), "--seconds", str(seconds)], check=True)
        found: dict[str, Any] = json.loads(path.read_text())["headline"][f"ours-{policy}"]
    return found


def table(results: dict[str, dict[str, float]]) -> str:
    direct, router = results["direct"], results["router"]
    rows = [("", "direct", "router", "added")]
    for name in router:
        rows.append((name, f"{direct[name]:.1f}", f"{router[name]:.1f}", f"{router[name] - direct[name]:+.1f}"))
    lines = [f"{name:24s}{a:>12s}{b:>12s}{c:>12s}" for name, a, b, c in rows]
    cost = router["cpu_us_per_request"]
    verdict = "within" if cost < TARGET_US else "ABOVE"
    lines.append(f"router: {cost:.1f} us of CPU a two-hop request, {verdict} the target of {TARGET_US:g} us")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--workers", type=int, default=2, help="of each role")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--policy", default="kv_cache_aware", help="of the kv-aware figures")
    arguments = parser.parse_args()
    results = run(arguments.runs, arguments.seconds, arguments.workers)
    print(table(results))
    if arguments.json is not None:
        figures = results | beside_peers(arguments.runs, arguments.seconds, arguments.policy)
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if results["router"]["cpu_us_per_request"] < TARGET_US else 1


if __name__ == "__main__":
    sys.exit(main())
