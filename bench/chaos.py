"""Break a cluster of real processes while it serves, and count what must never happen.

    python bench/chaos.py handoff [--requests 2000] [--seed N] [--faults 40] [--backend DEFAULT] [--json FILE]

The seed fixes every request, cancel, delay and kill, and their order; it is printed first. Requests go through the
router, straight to the two workers (hand-offs decoded twice, late, or after their release), and generation_first.
Faults: kill -9 of a context worker, a generation worker, the Mooncake master or Valkey, each started again at once;
delays inside the workers; acknowledgements and releases sent twice, late, or in the name of another incarnation.

Exit code 0: every answer that said it was whole was the right one, no request hung, and all KV blocks came back.
Requests that fail are counted, and are no fault: they were told so.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import random
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "mooncake"), str(HERE.parent / "tests" / "support")]

from cluster_rig import Cluster, Part, Reply, complete, eventually, is_idle  # noqa: E402 - after the path is set

STUCK_S = 45.0  # a request that takes longer is stuck
LEAK_S = 25.0  # blocks that are not back by then are leaked: longer than any lease here
PROBE_S = 20.0
LEASE_MS = 6000
PROMPTS = 24
KINDS = ("router", "stream", "cancel", "replay", "late", "released", "generation_first")
FAULTS = ("kill context", "kill generation", "kill master", "kill valkey", "delays", "stray messages")
CLEAR: dict[str, float] = {}


@dataclasses.dataclass(frozen=True)
class Step:
    """One request, and the fault that goes before it."""

    number: int
    kind: str
    prompt: int
    cancel_after: float
    fault: str | None
    chance: int  # for what else the step has to choose


def plan(seed: int, requests: int, faults: int) -> list[Step]:
    rng = random.Random(seed)
    when = set(rng.sample(range(requests // 20, requests), min(faults, requests - requests // 20)))
    order = [rng.choice(FAULTS) for _ in when]
    return [
        Step(
            number,
            rng.choice(KINDS),
            rng.randrange(PROMPTS),
            rng.uniform(0.0, 0.4),
            order.pop() if number in when else None,
            rng.randrange(2**31),
        )
        for number in range(requests)
    ]


def body_of(prompt: int) -> dict[str, Any]:
    rng = random.Random(f"prompt {prompt}")
    shared = [7 + prompt % 3] * 40  # some prefixes are common
    ids = shared[: rng.choice((0, 40))] + [rng.randint(3, 900) for _ in range(rng.choice((1, 31, 32, 65, 200, 400)))]
    sampling = {"temperature": 0.0} if prompt % 2 else {"temperature": 0.8, "seed": prompt}
    return {"model": "tiny", "prompt": ids, "max_tokens": rng.choice((2, 9, 24)), **sampling}


class Chaos:
    def __init__(self, folder: Path, backend: str, seed: int) -> None:
        self.seed = seed
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self.cluster = Cluster(folder, faults=True)
        self._lock = threading.Lock()
        # One thread for all faults: what it starts again ends with it.
        self._breaker = ThreadPoolExecutor(1)
        self._backend = backend
        self._expected: dict[int, Reply] = {}
        self._old_ids: collections.deque[int] = collections.deque([2**43], maxlen=200)
        self._next_id = 2**44 + (seed % 2**20) * 2**20

    def start(self) -> None:
        cluster = self.cluster
        cluster.start_registry()
        self.master = cluster.start_master()
        settings = {
            "cache_transceiver_config": {"backend": self._backend, "kv_transfer_timeout_ms": LEASE_MS},
            "fetch_timeout": 3.0,
            "kv_cache_config": {"max_tokens": 4096, "tokens_per_block": 32},
            "kv_connector_config": {
                "connector": "mooncake-store",
                "mooncake_store": {
                    "pool": f"file://{cluster.directory}/pool.json",
                    "model_key": "tiny",
                    "segment_size": "64MiB",
                    "run_dir": str(cluster.directory / "pool"),
                },
            },
        }
        self.context = cluster.worker("context", "CONTEXT", settings)
        self.generation = cluster.worker("generation", "GENERATION", settings)
        self.reference = cluster.worker("reference", None)
        self.router = cluster.router()
        cluster.start_all(self.context, self.generation, self.reference, self.router)
        for prompt in range(PROMPTS):
            self._expected[prompt] = complete(self.reference.url, body_of(prompt))
            assert self._expected[prompt].status == 200
        self.reference.stop()

    # ------------------------------------------------------------ requests

    def run(self, steps: list[Step], clients: int, tell: Callable[[str], None]) -> None:
        waiting = collections.deque(steps)
        threads = [threading.Thread(target=self._work, args=(waiting, tell), daemon=True) for _ in range(clients)]
        with self._breaker:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.finish()

    def _work(self, waiting: collections.deque[Step], tell: Callable[[str], None]) -> None:
        while True:
            try:
                step = waiting.popleft()
            except IndexError:
                return
            if step.fault is not None:
                tell(f"before request {step.number}: {step.fault}")
                self.counts[f"fault: {step.fault}"] += 1
                self._breaker.submit(self._break, step).result()
            start = time.monotonic()
            try:
                self._request(step)
            except (httpx.HTTPError, KeyError, ValueError) as error:
                kind = "timed out" if isinstance(error, httpx.ReadTimeout) else "failed"
                self._count(step, kind)
                if kind == "failed":
                    time.sleep(0.05)
            if time.monotonic() - start > STUCK_S:
                self._problem(f"request {step.number} ({step.kind}) took {time.monotonic() - start:.0f} s")

    def _request(self, step: Step) -> None:
        getattr(self, f"_do_{step.kind}")(step, body_of(step.prompt))

    def _do_router(self, step: Step, body: dict[str, Any]) -> None:
        self._judge(step, complete(self.router.url, body, timeout=STUCK_S))

    def _do_stream(self, step: Step, body: dict[str, Any]) -> None:
        self._judge(step, complete(self.router.url, body | {"stream": True}, timeout=STUCK_S))

    def _do_cancel(self, step: Step, body: dict[str, Any]) -> None:
        urls = (self.router.url, self.context.url, self.generation.url)
        url = urls[step.chance % 3] + "/v1/completions"
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(url, json=body | {"max_tokens": 200}, timeout=0.001 + step.cancel_after)
        self._count(step, "cancelled")

    def _do_replay(self, step: Step, body: dict[str, Any]) -> None:
        """One hand-off, decoded twice: the second time its pages may have other owners."""
        decode = self._prefill(step, body)
        if decode is not None:
            self._judge(step, complete(self.generation.url, decode, timeout=STUCK_S))
            self._judge(step, complete(self.generation.url, decode, timeout=STUCK_S))

    def _do_late(self, step: Step, body: dict[str, Any]) -> None:
        decode = self._prefill(step, body)
        if decode is not None:
            time.sleep(10 * step.cancel_after if step.chance % 4 == 0 else step.cancel_after)
            self._judge(step, complete(self.generation.url, decode, timeout=STUCK_S))

    def _do_released(self, step: Step, body: dict[str, Any]) -> None:
        """The release overtakes the reader."""
        decode = self._prefill(step, body)
        if decode is not None:
            self._release(decode["disaggregated_params"]["disagg_request_id"])
            self._judge(step, complete(self.generation.url, decode, timeout=STUCK_S))

    def _do_generation_first(self, step: Step, body: dict[str, Any]) -> None:
        number = self._new_id()
        shared = {"disagg_request_id": number, "schedule_style": 1}
        context = body | {"disaggregated_params": {"request_type": "context_only"} | shared}
        source = self.context.address
        params = {"request_type": "generation_only", "ctx_request_id": number, "ctx_info_endpoint": source}
        generation = body | {"disaggregated_params": params | shared}
        wait = step.cancel_after * (step.chance % 2)
        leg = threading.Thread(target=self._context_leg, args=(context, wait), daemon=True)
        leg.start()
        try:
            self._judge(step, complete(self.generation.url, generation, timeout=STUCK_S))
        finally:
            leg.join(STUCK_S)

    def _context_leg(self, body: dict[str, Any], wait: float) -> None:
        time.sleep(wait)
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(self.context.url + "/v1/completions", json=body, timeout=STUCK_S)

    def _prefill(self, step: Step, body: dict[str, Any]) -> dict[str, Any] | None:
        """The body of the generation leg; None when the answer ended with its first token, or failed."""
        params = {"request_type": "context_only", "disagg_request_id": self._new_id()}
        sent = body | {"disaggregated_params": params}
        response = httpx.post(self.context.url + "/v1/completions", json=sent, timeout=STUCK_S)
        if response.status_code != 200:
            self._count(step, f"refused {response.status_code}")
            return None
        choice = response.json()["choices"][0]
        if choice["finish_reason"] != "not_finished":
            return None
        return body | {"disaggregated_params": choice["disaggregated_params"] | {"request_type": "generation_only"}}

    def _judge(self, step: Step, reply: Reply) -> None:
        expected = self._expected[step.prompt]
        if reply.status != 200:
            self._count(step, f"refused {reply.status}")
        elif reply.error is not None or not reply.done or reply.finish_reason is None:
            self._count(step, "cut")
            if expected.token_ids[: len(reply.token_ids)] != reply.token_ids:
                self._problem(f"request {step.number} ({step.kind}): wrong tokens before it was cut: {reply}")
        elif (reply.token_ids, reply.text, reply.finish_reason) == (
            expected.token_ids, expected.text, expected.finish_reason,
        ):  # fmt: skip
            self._count(step, "right")
        else:
            self._count(step, "WRONG")
            self._problem(f"request {step.number} ({step.kind}): {reply} instead of {expected}")

    # ------------------------------------------------------------ faults

    def _break(self, step: Step) -> None:
        match step.fault:
            case "kill context":
                self._kill(self.context)
            case "kill generation":
                self._kill(self.generation)
            case "kill master":
                self._kill_master()
            case "kill valkey":
                assert self.cluster.registry is not None
                self.cluster.registry.stop(timeout=0)
                self.cluster.registry.start()
            case "delays":
                self._set_delays(step)
            case "stray messages":
                self._stray(step)

    def _kill(self, worker: Part) -> None:
        """Started again on another port: routers and peers find the new incarnation by the registry."""
        worker.kill()
        worker.launch()
        worker.wait_for_address().wait_until_healthy()

    def _kill_master(self) -> None:
        port = self.cluster.master_port()
        self.master.kill()
        self.master = self.cluster.start_master(rpc_port=port)

    def _set_delays(self, step: Step) -> None:
        rng = random.Random(step.chance)
        for worker in (self.context, self.generation):
            stages = {stage: rng.uniform(0, 0.05) for stage in ("fetch", "publish", "step", "prefill_chunk")}
            stages = {stage: seconds for stage, seconds in stages.items() if rng.random() < 0.5}
            with contextlib.suppress(httpx.HTTPError):
                httpx.put(worker.url + "/debug/delays", json=stages, timeout=5)

    def _stray(self, step: Step) -> None:
        rng = random.Random(step.chance)
        for _ in range(20):
            incarnation = rng.choice((None, "0" * 16, self._incarnation()))
            self._release(rng.choice(list(self._old_ids)), incarnation)

    def _incarnation(self) -> str | None:
        with contextlib.suppress(httpx.HTTPError, KeyError):
            return str(httpx.get(self.context.url + "/server_info", timeout=5).json()["incarnation"])
        return None

    def _release(self, number: int, incarnation: str | None = None) -> None:
        message = {"disagg_request_id": number, "incarnation": incarnation}
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(self.context.url + "/handoff/release", json=message, timeout=5)

    # ------------------------------------------------------------ books

    def finish(self) -> None:
        for worker in (self.context, self.generation):
            with contextlib.suppress(httpx.HTTPError):
                httpx.put(worker.url + "/debug/delays", json=CLEAR, timeout=5)
        for worker in (self.context, self.generation):
            try:
                eventually(lambda worker=worker: is_idle(worker), LEAK_S, f"{worker.name} idle")
            except (AssertionError, httpx.HTTPError) as error:
                self._problem(f"leak: {worker.name}: {error}")
        for prompt in range(0, PROMPTS, 6):
            reply = self._probe(prompt)
            if reply.token_ids != self._expected[prompt].token_ids:
                self._problem(f"a request after all faults: {reply}")

    def _probe(self, prompt: int) -> Reply:
        """Retried for a while: the router may still be finding out who is there."""
        deadline = time.monotonic() + PROBE_S
        while True:
            reply = complete(self.router.url, body_of(prompt), timeout=STUCK_S)
            if reply.status == 200 or time.monotonic() > deadline:
                return reply
            time.sleep(0.2)

    def _new_id(self) -> int:
        with self._lock:
            self._next_id += 1
            self._old_ids.append(self._next_id)
            return self._next_id

    def _count(self, step: Step, what: str) -> None:
        with self._lock:
            self.counts[what] += 1
            self.counts[f"{step.kind}: {what}"] += 1

    def _problem(self, text: str) -> None:
        with self._lock:
            self.problems.append(text)
        print(f"PROBLEM seed {self.seed}: {text}", flush=True)


def handoff(seed: int, requests: int, faults: int, backend: str, clients: int, quiet: bool = False) -> dict[str, Any]:
    """The whole run; {"seed", "counts", "problems", "seconds"}."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        chaos = Chaos(Path(folder), backend, seed)
        with chaos.cluster:
            chaos.start()
            chaos.run(plan(seed, requests, faults), clients, (lambda _: None) if quiet else print)
            if chaos.problems:
                for part in chaos.cluster.parts.values():
                    print(f"---- {part.name}\n{part.tail(30)}", flush=True)
    seconds = round(time.monotonic() - begun, 1)
    return {"seed": seed, "counts": dict(chaos.counts), "problems": chaos.problems, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["handoff"])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--backend", default="DEFAULT")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}: {arguments.requests} requests, {arguments.faults} faults, {arguments.backend}", flush=True)
    result = handoff(seed, arguments.requests, arguments.faults, arguments.backend, arguments.clients)
    for name, count in sorted(result["counts"].items()):
        print(f"{count:6}  {name}")
    print(f"{len(result['problems'])} problems in {result['seconds']} s; again with --seed {seed}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
