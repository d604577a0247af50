"""A whole cluster of real processes on loopback, each part of which a test can kill, pause and start again.

Every process is started through the command line that a user would type, reports its port by --report_addr, logs into
the test's directory, and is ended by pid when the rig closes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from kvstore.registry.embedded import EmbeddedValkey

TINY = Path(__file__).resolve().parent.parent / "models" / "tiny-chat"
SCRIPTED = Path(__file__).resolve().parent.parent / "models" / "scripted"
START_LIMIT_S = 50.0


def eventually(check: Callable[[], Any], limit_s: float, what: str = "", every_s: float = 0.02) -> Any:
    """The first truthy value of `check`, polled; AssertionError with its last value after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what or check!r} (last value {value!r})")
        time.sleep(every_s)


@dataclasses.dataclass
class Part:
    """One process of the cluster and how to start it again."""

    name: str
    argv: list[str]
    directory: Path
    env: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    address: str = ""

    @property
    def log(self) -> Path:
        return self.directory / f"{self.name}.log"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def launch(self) -> None:
        report = self.directory / f"{self.name}.addr"
        report.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv, stdout=log, stderr=log, env=self.env, start_new_session=True, cwd=self.directory
            )

    def wait_for_address(self) -> Part:
        report = self.directory / f"{self.name}.addr"
        assert self.process is not None

        def reported() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"{self.name} exited {self.process.returncode}:\n{self.tail()}"
            return report.exists()

        eventually(reported, START_LIMIT_S, f"{self.name} reports its address\n{self.tail()}")
        self.address = report.read_text().strip()
        return self

    def wait_until_healthy(self, limit_s: float = START_LIMIT_S) -> Part:
        eventually(lambda: self.health() == 200, limit_s, f"{self.name} healthy\n{self.tail()}", every_s=0.05)
        return self

    def start(self) -> Part:
        self.launch()
        return self.wait_for_address().wait_until_healthy()

    def health(self) -> int:
        try:
            return httpx.get(self.url + "/health", timeout=5).status_code
        except httpx.HTTPError:
            return 0

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9 of the server process alone; its children must notice by themselves."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, limit_s: float = 40.0) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"{self.name} did not end within {limit_s} s of SIGTERM\n{self.tail()}") from None
        return self.process.returncode


class Cluster:
    """Valkey, optionally a Mooncake master, workers and a router. Use as a context manager."""

    def __init__(self, directory: Path, *, model: Path = TINY, faults: bool = False) -> None:
        self.directory = directory
        self.model = model
        self.parts: dict[str, Part] = {}
        self.registry: EmbeddedValkey | None = None
        self.env = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.faults = faults
        if faults:
            self.env["TRTLLM_DISAGG_FAULT_INJECTION"] = "1"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        for part in reversed(self.parts.values()):
            if part.process is not None and part.process.poll() is None:
                part.process.terminate()
        for part in reversed(self.parts.values()):
            if part.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    part.process.wait(20)
                if part.process.poll() is None:
                    part.process.kill()
                    part.process.wait()
        if self.registry is not None:
            self.registry.stop()

    # ------------------------------------------------------------------ parts

    def _part(self, name: str, argv: list[str], env: dict[str, str] | None = None) -> Part:
        part = Part(name, [sys.executable, "-m", "trtllm_serve", *argv], self.directory, self.env | (env or {}))
        self.parts[name] = part
        return part

    def start_registry(self, port: int | None = None) -> EmbeddedValkey:
        self.registry = EmbeddedValkey(port=port)
        self.registry.start()
        return self.registry

    @property
    def registry_uri(self) -> str:
        assert self.registry is not None
        return self.registry.uri

    def start_master(self, **options: object) -> Part:
        argv = ["mooncake_master", "--protocol", "tcp", "--run_dir", str(self.directory / "pool")]
        argv += ["--pool_file", str(self.directory / "pool.json")]
        for name, value in ({"rpc_port": 0, "metrics_port": 0, "heartbeat_seconds": 0} | options).items():
            argv += [f"--{name}", str(value)]
        part = self._part("master", argv)
        (self.directory / "pool.json").unlink(missing_ok=True)  # a killed master could not withdraw it
        part.launch()
        eventually((self.directory / "pool.json").exists, START_LIMIT_S, f"pool manifest\n{part.tail()}")
        return part

    def master_port(self) -> int:
        """The port that the master's manifest names, to start another one in its place."""
        manifest = json.loads((self.directory / "pool.json").read_text())
        return int(manifest["master_server_address"].rpartition(":")[2])

    def worker(self, name: str, role: str | None, settings: dict[str, Any] | None = None) -> Part:
        """A worker part, not started. `role` None is an aggregated server, which is not registered."""
        config = {
            "max_batch_size": 16,
            "max_num_tokens": 128,
            "cpu_threads": 1,
            "kv_cache_config": {"max_tokens": 8192, "tokens_per_block": 32, "event_buffer_max_size": 1024},
        }
        config |= settings or {}
        config_file = self.directory / f"{name}.yaml"
        config_file.write_text(yaml.safe_dump(config))
        argv = ["serve", str(self.model), "--host", "127.0.0.1", "--port", "0"]
        argv += ["--report_addr", str(self.directory / f"{name}.addr"), "--config", str(config_file)]
        argv += ["--served_model_name", "tiny"]
        if self.model == SCRIPTED:
            argv += ["--custom_module_dirs", str(SCRIPTED)]
        if role is not None:
            argv += ["--server_role", role, "--disagg_cluster_uri", self.registry_uri]
        return self._part(name, argv)

    def router(self, settings: dict[str, Any] | None = None, name: str = "router") -> Part:
        config: dict[str, Any] = {
            "hostname": "127.0.0.1",
            "port": 0,
            "model": str(self.model),
            "context_servers": {"router": {"type": "round_robin"}},
            "generation_servers": {"router": {"type": "round_robin"}},
            "disagg_cluster": {
                "cluster_uri": self.registry_uri,
                "heartbeat_interval_sec": 1,
                "inactive_timeout_sec": 3,
            },
        }
        config |= settings or {}
        config_file = self.directory / f"{name}.yaml"
        config_file.write_text(yaml.safe_dump(config))
        argv = ["disaggregated", "-c", str(config_file), "--report_addr", str(self.directory / f"{name}.addr")]
        return self._part(name, argv)

    def start_all(self, *parts: Part) -> None:
        """Launch together, then wait for each: start-up is mostly imports, which overlap."""
        for part in parts:
            part.launch()
        for part in parts:
            part.wait_for_address()
        for part in parts:
            part.wait_until_healthy()


# ---------------------------------------------------------------------- looking inside


def gauges(worker: Part) -> dict[str, float]:
    """The worker's unlabelled trtllm_disagg_ metrics by name without that prefix."""
    found = {}
    for line in httpx.get(worker.url + "/prometheus/metrics", timeout=5).text.splitlines():
        if line.startswith("trtllm_disagg_") and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.removeprefix("trtllm_disagg_").partition("{")[0]] = float(value)
    return found


IDLE = (
    "kv_blocks_used",
    "kv_blocks_pinned",
    "requests_running",
    "requests_waiting",
    "requests_fetching",
    "handoffs_open",
)


def is_idle(worker: Part) -> bool:
    """True when no request, page or hand-off is held: the baseline that every test must return to."""
    now = gauges(worker)
    return all(now[name] == 0 for name in IDLE)


def baseline(*workers: Part, limit_s: float = 5.0) -> None:
    for worker in workers:
        eventually(lambda worker=worker: is_idle(worker), limit_s, f"{worker.name} back at baseline")


# ---------------------------------------------------------------------- requests


@dataclasses.dataclass
class Reply:
    """What a client can tell apart, of one choice, streamed or not."""

    status: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = True  # [DONE] seen, or a whole JSON body


def complete(base_url: str, body: dict[str, Any], *, timeout: float = 60.0) -> Reply:
    """POST /v1/completions or /v1/chat/completions (by the body's fields), read as one Reply."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if not body.get("stream"):
        response = httpx.post(base_url + path, json=body, timeout=timeout)
        return _whole(response.status_code, response.json())
    with httpx.stream("POST", base_url + path, json=body, timeout=timeout) as response:
        if response.status_code != 200:
            response.read()
            return _whole(response.status_code, response.json())
        reply = Reply(200, done=False)
        try:
            for event in events(response.iter_lines()):
                if event == "[DONE]":
                    reply.done = True
                    continue
                _add(reply, json.loads(event))
        except httpx.HTTPError as error:
            reply.error = reply.error or {"message": repr(error)}
        return reply


def events(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith("data: "):
            yield line[6:]


def _whole(status: int, document: dict[str, Any]) -> Reply:
    if status != 200:
        return Reply(status, error=document["error"])
    choice = document["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Reply(200, text or "", list(choice.get("token_ids") or []), choice["finish_reason"], document.get("usage"))


def _add(reply: Reply, event: dict[str, Any]) -> None:
    if "error" in event:
        reply.error = event["error"]
        return
    reply.usage = event.get("usage") or reply.usage
    for choice in event["choices"]:
        delta = choice.get("delta", choice)
        reply.text += delta.get("content") or delta.get("text") or ""
        reply.token_ids += choice.get("token_ids") or []
        if choice.get("finish_reason"):
            assert reply.finish_reason is None, "two finish reasons"
            reply.finish_reason = choice["finish_reason"]


# ---------------------------------------------------------------------- load


class Load:
    """Clients that send one request after another from threads until stopped; keeps every reply with its duration."""

    def __init__(self, base_url: str, bodies: list[dict[str, Any]], clients: int) -> None:
        import threading

        self.base_url, self.bodies = base_url, bodies
        self.replies: list[tuple[float, float, dict[str, Any], Reply]] = []  # (start, seconds, body, reply)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(clients)]

    def _run(self, offset: int) -> None:
        number = offset
        while not self._stop.is_set():
            body = self.bodies[number % len(self.bodies)]
            number += 1
            start = time.monotonic()
            try:
                reply = complete(self.base_url, body, timeout=30)
            except httpx.HTTPError as error:
                reply = Reply(0, error={"message": f"transport: {error!r}"}, done=False)
            self.replies.append((start, time.monotonic() - start, body, reply))
            if reply.status != 200:
                self._stop.wait(0.05)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs"


SIGSTOP, SIGCONT = signal.SIGSTOP, signal.SIGCONT
