"""The vLLM cluster of vllm_cluster.py behind this project's router and behind vllm-router, against one server alone.

    python bench/vllm_compare.py [--requests 12] [--tokens 32] [--routers alone,ours,vllm-router] [--json FILE]

Every router gets the same prompts, plain and streamed, one after another and two at a time. Answers must equal those of
the decode server alone, token for token (greedy). Times are of the whole way as a client sees them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import random
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

from vllm_cluster import DECODE, DEFAULT_HOME, MODEL_NAME, PREFILL, end, make_model, running, text_of

HERE = Path(__file__).resolve().parent
ROUTER_PORT = 18110
_WORDS = ("river", "stone", "house", "tree", "blue", "green", "word", "light", "north", "silver", "garden", "window")


def command(name: str, folder: Path) -> list[str]:
    """What starts a router in front of the cluster."""
    if name == "ours":
        config = folder / "disagg.yaml"
        block = {"num_instances": 1, "router": {"type": "round_robin"}}
        servers = {
            "context_servers": block | {"urls": [PREFILL.url.removeprefix("http://")]},
            "generation_servers": block | {"urls": [DECODE.url.removeprefix("http://")]},
        }
        config.write_text(json.dumps({"hostname": "127.0.0.1", "port": ROUTER_PORT, **servers}))
        return [sys.executable, "-m", "trtllm_serve", "disaggregated", "-c", str(config), "-l", "warning"]
    program = Path(tempfile.gettempdir()) / "trtllm-disagg-peers" / "vllm-router" / "bin" / "vllm-router"
    workers = ["--vllm-pd-disaggregation", "--prefill", PREFILL.url, "--decode", DECODE.url]
    listen = ["--host", "127.0.0.1", "--port", str(ROUTER_PORT), "--prometheus-port", str(ROUTER_PORT + 1)]
    return [str(program), *workers, *listen, "--policy", "round_robin", "--log-level", "error"]


@contextlib.contextmanager
def router(name: str) -> Iterator[str]:
    """The address that clients use. `alone` is the decode server itself."""
    if name == "alone":
        yield DECODE.url
        return
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as folder:
        log = Path(folder) / "router.log"
        root = HERE.parent
        environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'mooncake'}" if name == "ours" else ""}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(name, Path(folder)), stdout=output, stderr=output, env=environment, start_new_session=True
            )
        try:
            _wait_answers(process, log)
            yield f"http://127.0.0.1:{ROUTER_PORT}"
        finally:
            end(process)


def _wait_answers(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    problem = "nothing listens"
    while time.monotonic() < deadline and process.poll() is None:
        try:
            ask(f"http://127.0.0.1:{ROUTER_PORT}", {"prompt": "Hello", "max_tokens": 2})
            return
        except urllib.error.HTTPError as error:
            problem = f"{error.code} {error.read()[:300]!r}"
        except (OSError, ValueError, KeyError) as error:
            problem = repr(error)
        time.sleep(0.5)
    raise SystemExit(f"no answer through the router: {problem}\n{log.read_text(errors='replace')[-2000:]}")


def ask(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The text, and seconds until its first byte and until its end."""
    body = {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    started = time.monotonic()
    with urllib.request.urlopen(request, timeout=180) as answer:
        first = answer.read(1)
        to_first = time.monotonic() - started
        whole = first + answer.read()
    return {"text": text_of(whole), "first": to_first, "whole": time.monotonic() - started}


def decoded() -> float:
    """Requests that the decode server has completed. A router that never hands over leaves it idle."""
    with urllib.request.urlopen(f"{DECODE.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:request_success_total"))


def measure(url: str, prompts: list[str], tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {"texts": []}
    before = decoded()
    for mode, stream, at_once in (("plain", False, 1), ("streamed", True, 1), ("two_at_once", True, 2)):
        started = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            fields = [{"prompt": prompt, "max_tokens": tokens, "stream": stream} for prompt in prompts]
            answers = list(pool.map(lambda one: ask(url, one), fields))
        elapsed = time.monotonic() - started
        found["texts"] += [answer["text"] for answer in answers]
        found[mode] = {
            "first_s_p50": statistics.median(answer["first"] for answer in answers),
            "whole_s_p50": statistics.median(answer["whole"] for answer in answers),
            "tokens_per_second": tokens * len(prompts) / elapsed,
        }
    found["handed_over"] = decoded() - before == len(found["texts"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=DEFAULT_HOME)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--routers", default="alone,ours,vllm-router")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    make_model(arguments.home)
    rng = random.Random(3)
    prompts = [f"Story {number}: " + " ".join(rng.choices(_WORDS, k=150)) for number in range(arguments.requests)]
    results: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    with running(arguments.home):
        for name in arguments.routers.split(","):
            try:
                with router(name) as url:
                    measure(url, prompts[:1], 2)  # warms whatever is compiled on first use
                    results[name] = measure(url, prompts, arguments.tokens)
            except SystemExit as problem:
                results[name] = {"problem": str(problem)}
                print(f"{name}: {problem}", file=sys.stderr)
    report(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return (
        0 if all(figures.get("different", 1) == 0 for figures in results.values() if isinstance(figures, dict)) else 1
    )


def report(results: dict[str, Any]) -> None:
    """One line a router and mode; the texts give way to the number of those that differ."""
    right = results.get("alone", {}).get("texts")
    for name, figures in results.items():
        if not isinstance(figures, dict) or "texts" not in figures:
            continue
        texts = figures.pop("texts")
        figures["different"] = sum(one != other for one, other in zip(texts, right or texts, strict=True))
        for mode in ("plain", "streamed", "two_at_once"):
            values = "  ".join(f"{key} {value:8.3f}" for key, value in figures[mode].items())
            print(f"{name:14s}{mode:14s}{values}")
        print(f"{name:14s}different {figures['different']} of {len(texts)}, handed over: {figures['handed_over']}")


if __name__ == "__main__":
    sys.exit(main())
