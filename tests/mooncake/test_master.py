"""The command `mooncake_master` as an operator starts it, with the real binary and with binaries that misbehave
(C143)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pool_master import COMMAND, PoolMaster, pool_master, wait_until

from mooncake_pool import master as m
from mooncake_pool.manifest import Manifest, encode_manifest, read_manifest
from mooncake_pool.net import free_ports, port_is_free
from mooncake_pool.samples import read_samples
from trtllm_serve.mooncake import mooncake_master


def script(folder: Path, body: str) -> str:
    path = folder / "binary.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def python_script(folder: Path, body: str) -> str:
    path = folder / "binary.py"
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(0o755)
    return str(path)


def refused(folder: Path, **options: Any) -> tuple[str, float]:
    """What the command says that ends with exit code 1, and after how many seconds."""
    begun = time.monotonic()
    master = PoolMaster(folder, **options)
    code, output = master.finish()
    assert code == 1, output
    assert not master.pool_file.exists() and not (master.run_dir / "pool.json").exists()
    return output, time.monotonic() - begun


def processes_with(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and text in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--eviction_ratio=0", "0<x<=1"),
        ("--eviction_ratio=1.5", "0<x<=1"),
        ("--eviction_ratio=-1", "0<x<=1"),
        ("--eviction_ratio=nan", "not a finite number"),
        ("--timeout=-1", "x>0"),
        ("--timeout=0", "x>0"),
        ("--timeout=inf", "not a finite number"),
        ("--heartbeat_seconds=-1", "x>=0"),
        ("--protocol=ucx", "'ucx' is not one of"),
        ("--rpc_port=70000", "0<=x<=65535"),
        ("--metrics_port=50051", "--rpc_port and --metrics_port are both 50051"),
        ("--metadata_server=redis://h:6379", "have no Redis"),
        ("--namespace=a,b", "pool keys cannot have"),
        ("--namespace=", "is empty"),
    ],
)
def test_usage_errors(option: str, said: str) -> None:
    run = CliRunner().invoke(mooncake_master, [option])
    assert run.exit_code == 2 and said in run.output


def test_missing_binary(tmp_path: Path) -> None:
    output, seconds = refused(tmp_path, binary="nope")
    assert seconds < 1.0
    assert "'nope' is not an executable on PATH" in output and "`cpu`" in output and "apt-get install" in output


def test_a_busy_port_is_never_adopted(tmp_path: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("0.0.0.0", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        output, _ = refused(tmp_path, rpc_port=port)
        assert f"--rpc_port {port} is already in use" in output
        output, _ = refused(tmp_path, metrics_port=port)
        assert f"--metrics_port {port} is already in use" in output


def test_an_early_exit_is_told_at_once(tmp_path: Path) -> None:
    body = "for i in $(seq 30); do echo line $i; done; echo boom >&2; exit 3"
    output, seconds = refused(tmp_path, binary=script(tmp_path, body), timeout=50)
    assert seconds < 5.0
    assert "exited with code 3" in output and "  boom" in output
    assert "  line 12\n" in output and "line 11\n" not in output  # the last 20 lines


def test_a_missing_library_comes_with_its_package(tmp_path: Path) -> None:
    body = "echo mooncake_master: error while loading shared libraries: libibverbs.so.1 >&2; exit 127"
    assert "apt-get install libibverbs1" in refused(tmp_path, binary=script(tmp_path, body))[0]


def test_a_master_that_never_listens(tmp_path: Path) -> None:
    binary = script(tmp_path, "sleep 312 &\nsleep 312")
    output, seconds = refused(tmp_path, binary=binary, timeout=0.5)
    assert 0.5 <= seconds < 5.0
    assert "did not serve on port" in output and "within 0.5 s" in output
    assert processes_with(binary) == [] and processes_with("sleep\x00312") == []


def test_a_master_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "END_SECONDS", 0.2)
    binary = python_script(
        tmp_path, "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    process = m.MasterProcess(binary, 1, 2, 0.05, tmp_path / "log")
    wait_until(lambda: "up" in process.log_tail(), 10, "stubborn master")
    process.end()
    process.end()
    assert process.exit_code() == -signal.SIGKILL


ANSWERING = """
import http.server, sys
ports = dict(arg[2:].split("=") for arg in sys.argv[1:] if arg.count("=") == 1)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"service_ready": true}')
http.server.HTTPServer(("127.0.0.1", int(ports["metrics_port"])), Health).serve_forever()
"""


def test_health_alone_is_not_ready(tmp_path: Path) -> None:
    """Something answers for us, but nobody of ours listens on the RPC port."""
    output, _ = refused(tmp_path, binary=python_script(tmp_path, ANSWERING), timeout=1)
    assert "did not serve on port" in output


def test_a_port_that_is_lost_meanwhile_is_chosen_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Port 0: the first choice is taken by a stranger between choice and start."""
    with socket.socket() as stranger:
        stranger.bind(("0.0.0.0", 0))
        stranger.listen()
        lost, *good = stranger.getsockname()[1], *free_ports(3)
        choices = [(lost, good[0]), (good[1], good[2])]
        monkeypatch.setattr(m, "_choose_ports", lambda _options: choices.pop(0))
        said: list[str] = []
        interruption = m.Interruption()
        options = m.MasterOptions(rpc_port=0, metrics_port=0, timeout=20)
        master = m._start_until_ready(options, m.find_binary("mooncake_master"), tmp_path, said.append, interruption)
        assert master is not None
        try:
            assert master.rpc_port == good[1] and said == [
                f"port {lost} or {good[0]} was taken meanwhile; trying others"
            ]
        finally:
            master.end()


# ---------------------------------------------------------------- the real binary


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_life(tmp_path: Path, number: signal.Signals) -> None:
    with pool_master(tmp_path, heartbeat_seconds=0, namespace="ns") as master:
        manifest = master.manifest()
        assert (manifest.protocol, manifest.namespace, manifest.eviction_ratio) == ("tcp", "ns", 0.05)
        assert read_manifest(master.run_dir / "pool.json") == manifest
        host, port = manifest.master
        socket.create_connection((host, port), 1).close()
        with urllib.request.urlopen(f"http://127.0.0.1:{manifest.metrics_port}/metrics", timeout=2) as answer:
            assert b"master_key_count" in answer.read()
        code, output = master.stop(number)
        assert code == 128 + number
        assert f"serves at {host}:{port}; log {master.run_dir}/mooncake_master.log; metrics http://" in output
        assert "alive after" not in output
        assert not master.pool_file.exists() and not (master.run_dir / "pool.json").exists()
        assert read_manifest(master.run_dir / "pool.last.json") == manifest
        assert port_is_free(port)
        assert "Master service started" in (master.run_dir / "mooncake_master.log").read_text()


@pytest.mark.cluster
def test_liveness_lines_and_samples(tmp_path: Path) -> None:
    with pool_master(tmp_path, heartbeat_seconds=0.2) as master:
        assert master.process.stdout is not None
        lines = [master.process.stdout.readline() for _ in range(3)]
        assert "serves at" in lines[0] and all("mooncake_master alive after" in line for line in lines[1:])
        _, output = master.stop()
        samples, problems = read_samples(master.run_dir)
        assert len(samples) >= 3 and problems == [] and "samples for the report are missing" not in output
        assert samples[-1].segments == [] and samples[-1].metrics["master_key_count"] == 0


@pytest.mark.cluster
def test_the_death_of_the_master_ends_the_command(tmp_path: Path) -> None:
    with pool_master(tmp_path) as master:
        os.kill(master.manifest().extra["master_pid"], signal.SIGKILL)
        code, output = master.finish()
        assert code == 1
        assert f"mooncake_master exited with code -9. See {master.run_dir}/mooncake_master.log" in output
        assert not master.pool_file.exists()


@pytest.mark.cluster
def test_the_death_of_the_command_ends_the_master(tmp_path: Path) -> None:
    with pool_master(tmp_path) as master:
        pid = master.manifest().extra["master_pid"]
        master.process.kill()
        master.process.communicate(timeout=10)
        wait_until(lambda: not Path(f"/proc/{pid}/exe").exists(), 5, "end of the orphan")


@pytest.mark.cluster
def test_a_manifest_that_another_master_wrote_stays(tmp_path: Path) -> None:
    with pool_master(tmp_path) as master:
        other = encode_manifest(Manifest("10.0.0.9:50051"))
        master.pool_file.write_text(other)
        master.stop()
        assert master.pool_file.read_text() == other


@pytest.mark.cluster
def test_a_signal_during_start_up(tmp_path: Path) -> None:
    binary = script(tmp_path, "touch started; sleep 312")
    command = [*COMMAND, "--rpc_port=0", "--metrics_port=0", f"--binary={binary}", f"--run_dir={tmp_path}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path)
    wait_until((tmp_path / "started").exists, 10, "start of the binary")
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM
    assert processes_with(binary) == []
