"""`trtllm-serve local` with real processes: a whole cluster comes up, serves, and ends without a trace."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml
from registry_helpers import eventually

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL: dict[str, Any] = {
    "hostname": "127.0.0.1",
    "port": 0,
    "model": "tiny",
    "max_batch_size": 8,
    "max_num_tokens": 128,
    "cpu_threads": 1,
    "kv_cache_config": {"max_tokens": 4096},
    "context_servers": {"num_instances": 1},
    "generation_servers": {"num_instances": 1},
    "disagg_cluster": {"cluster_uri": "redis://embedded", "heartbeat_interval_sec": 1, "inactive_timeout_sec": 3},
}
REPEAT = "apple river stone house tree blue"


@dataclasses.dataclass
class Local:
    process: subprocess.Popen[str]
    report: Path
    run_dir: Path

    def address(self) -> str:
        """host:port of the router, once all serve."""
        eventually(lambda: self.report.exists() or self.process.poll() is not None, timeout=50)
        assert self.report.exists(), self.end()
        return self.report.read_text().strip()

    def family(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def end(self) -> tuple[int, str, str]:
        """Exit status, output, messages; once it has ended by itself."""
        output, messages = self.process.communicate(timeout=30)
        return self.process.returncode, output, messages


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Local] = []

    def start(config: Path | dict[str, Any], *words: str) -> Local:
        if isinstance(config, dict):
            config = _written(tmp_path / "cluster.yaml", config)
        report, run_dir = tmp_path / "address", tmp_path / "run"
        argv = [sys.executable, "-m", "trtllm_serve", "local", "-c", str(config), "--port", "0"]
        argv += ["--report_addr", str(report), "--run_dir", str(run_dir), *words]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(Local(process, report, run_dir))
        return started[-1]

    yield start
    for local in started:
        if local.process.poll() is None:
            local.process.kill()  # the kernel takes its children
        local.process.communicate(timeout=10)


def _written(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(document))
    return path


def _left(family: list[psutil.Process]) -> list[str]:
    running = []
    for process in family:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            pass
    return running


@pytest.mark.cluster
@pytest.mark.timeout(120)
def test_the_shipped_cluster_serves_and_ends_with_ctrl_c(start: Any) -> None:
    local = start(ROOT / "configs" / "local.yaml", "--model", "tiny")
    address = local.address()
    family = local.family()
    assert any("valkey-server" in line for line in _left(family))
    assert any("mooncake_master" in line for line in _left(family))
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": f"Repeat: {REPEAT}"}],
            temperature=0,
            max_tokens=32,
            stream=True,
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces).strip() == REPEAT
    assert len(pieces) > 3
    assert httpx.get(f"http://{address}/health").status_code == 200
    local.process.send_signal(signal.SIGINT)
    status, output, messages = local.end()
    assert status == 130
    assert output.startswith(f"ready http://{address}  context 127.0.0.1:") and "generation 127.0.0.1:" in output
    assert "SIGINT" in messages and "killed" not in messages, messages
    eventually(lambda: not _left(family), timeout=5, what=str(_left(family)))
    assert not local.report.exists()


@pytest.mark.cluster
@pytest.mark.timeout(120)
def test_a_killed_launcher_leaves_nothing_behind(start: Any) -> None:
    local = start(ROOT / "configs" / "local.yaml", "--model", "tiny")
    local.address()
    family = local.family()
    assert len(family) >= 8  # launcher, valkey, master and its binary, two workers and their engines, router
    local.process.kill()
    eventually(lambda: not _left(family), timeout=5, what="\n".join(_left(family)))


@pytest.mark.cluster
@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", ["generation-0", "valkey"])
def test_a_part_that_dies_ends_the_cluster_with_its_last_words(start: Any, victim: str) -> None:
    local = start(SMALL)
    local.address()
    family = local.family()
    mark = "valkey-server" if victim == "valkey" else f"{victim}.yaml"
    [process] = [process for process in family if any(mark in word for word in process.cmdline())]
    process.kill()
    status, _, messages = local.end()
    assert status == 1
    assert f"{victim} ended" in messages and str(local.run_dir / f"{victim}.log") in messages
    if victim != "valkey":
        assert "registered GENERATION-" in messages
    eventually(lambda: not _left(family), timeout=5)


@pytest.mark.cluster
@pytest.mark.timeout(120)
@pytest.mark.parametrize("registry", ["hosted by the router", "none"])
def test_clusters_without_redis(start: Any, registry: str) -> None:
    config = SMALL | {"disagg_cluster": {"cluster_uri": "http://127.0.0.1:8000", "heartbeat_interval_sec": 1}}
    if registry == "none":
        del config["disagg_cluster"]
    local = start(config)
    address = local.address()
    assert not any("valkey-server" in line for line in _left(local.family()))
    body = {"model": "tiny", "prompt": "Repeat: apple", "max_tokens": 4, "temperature": 0}
    response = httpx.post(f"http://{address}/v1/completions", json=body, timeout=20)
    assert response.status_code == 200, response.text
    local.process.terminate()
    assert local.end()[0] == 143


@pytest.mark.cluster
@pytest.mark.timeout(60)
def test_a_worker_that_cannot_start_is_an_error_with_its_words(start: Any) -> None:
    local = start(SMALL | {"generation_servers": {"num_instances": 1, "max_seq_len": -5}})
    status, output, messages = local.end()
    assert status == 1 and output == ""
    assert "generation-0 ended with exit code 2" in messages and "max_seq_len" in messages
    assert not local.report.exists()


@pytest.mark.cluster
def test_a_run_directory_is_for_one_cluster(start: Any, tmp_path: Path) -> None:
    first = start(SMALL)
    eventually(lambda: (first.run_dir / "valkey.log").exists())
    second = start(SMALL)
    status, _, messages = second.end()
    assert status == 2
    assert "--run_dir" in messages and "in use" in messages


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (SMALL | {"disagg_cluster": {"cluster_uri": "etcd://h:1"}}, "etcd:// is not in this build"),
        (SMALL | {"model": "/no/such/model"}, "/no/such/model"),
        (SMALL | {"port": "soon"}, "port"),
        ({"hostname": "127.0.0.1"}, "nothing to start"),
    ],
)
def test_bad_files_are_told_at_once(start: Any, tmp_path: Path, config: dict[str, Any], named: str) -> None:
    if config.get("port") == "soon":
        path = _written(tmp_path / "bad.yaml", config)
        argv = [sys.executable, "-m", "trtllm_serve", "local", "-c", str(path)]
        result = subprocess.run(argv, capture_output=True, text=True, timeout=30)
        status, messages = result.returncode, result.stderr
    else:
        status, _, messages = start(config).end()
    assert status == 2
    assert named in messages and "Traceback" not in messages


def test_a_missing_file_is_told(start: Any) -> None:
    status, _, messages = start(Path("/no/such.yaml")).end()
    assert status == 2
    assert "/no/such.yaml" in messages
