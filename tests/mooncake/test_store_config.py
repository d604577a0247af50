from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import SettingsError
from mooncake_pool import store_config
from mooncake_pool.manifest import Manifest
from mooncake_pool.store_config import (
    EffectiveSettings,
    RunDir,
    bytes_of,
    check_settings,
    effective_settings,
    memory_problem,
    node_memory,
    store_settings,
)

GIB = 1024**3


@pytest.mark.parametrize(
    ("text", "size"),
    [(5, 5), ("5", 5), ("4KiB", 4096), ("1.5 MiB", 1572864), ("160GiB", 160 * GIB), ("2TiB", 2048 * GIB), ("0", 0)],
)
def test_sizes(text: object, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize(
    "text", ["160GB", "1G", "5 gib", "-1GiB", "GiB", "", "0.3KiB", "nanGiB", "infGiB", True, 1.5, None]
)
def test_sizes_that_are_refused(text: object) -> None:
    with pytest.raises(SettingsError, match=r"KiB, MiB, GiB, TiB \(1024-based\)"):
        bytes_of(text)


# ---------------------------------------------------------------- precedence


def inherited(folder: Path, **content: Any) -> dict[str, str]:
    path = folder / "mooncake.json"
    path.write_text(json.dumps(content))
    return {"MOONCAKE_CONFIG_PATH": str(path)}


def test_an_inherited_file_wins_key_by_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    environment = inherited(
        tmp_path,
        master_server_address="10.0.0.5:50051",
        protocol="rdma",
        device_name="mlx5_7",
        global_segment_size="2GiB",
        local_buffer_size=1073741824,
        role="capacity",
        namespace="",
        surprise=1,
    )
    yaml = EffectiveSettings(pool="file:///pool.json", role="both", namespace="mine", model_key="m")
    settings = effective_settings(yaml, environment)
    assert (settings.pool, settings.role, settings.segment_size) == ("10.0.0.5:50051", "capacity", 2 * GIB)
    assert (settings.namespace, settings.model_key) == ("mine", "m")  # the file says nothing of them
    assert "keys that are not known and do nothing: surprise" in caplog.text
    store = store_settings(settings, Manifest("10.0.0.5:50051", protocol="tcp"))
    assert (store.protocol, store.devices) == ("rdma", "mlx5_7")


def test_without_it_the_block_and_the_manifest_count() -> None:
    yaml = EffectiveSettings(pool="127.0.0.1:1", local_hostname="10.1.1.1", segment_size=0)
    assert effective_settings(yaml, {}) == yaml
    store = store_settings(yaml, Manifest("127.0.0.1:1", protocol="tcp", metadata_server="http://m"))
    assert (store.local_hostname, store.protocol, store.metadata_server) == ("10.1.1.1", "tcp", "http://m")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "mooncake.json: "),
        ("[]", "a JSON object is needed"),
        ('{"role": 5}', "Expected `str`, got `int`"),
        ('{"global_segment_size": "2GB"}', "'2GB' is neither"),
    ],
)
def test_a_file_that_makes_no_sense(tmp_path: Path, text: str, said: str) -> None:
    environment = inherited(tmp_path)
    (tmp_path / "mooncake.json").write_text(text)
    with pytest.raises(SettingsError) as error:
        effective_settings(EffectiveSettings(pool="127.0.0.1:1"), environment)
    assert said in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="MOONCAKE_CONFIG_PATH"):
        effective_settings(EffectiveSettings(pool="127.0.0.1:1"), {"MOONCAKE_CONFIG_PATH": str(tmp_path / "none")})


# ---------------------------------------------------------------- memory


def test_segments_beyond_the_nodes_memory_are_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_problem(8 * GIB, 8, 64 * GIB) == [] and memory_problem(GIB, 1, 0) == []
    ((path, said),) = memory_problem(8 * GIB, 9, 64 * GIB)
    assert path == "mooncake_store.segment_size"
    assert said == f"{8 * GIB} bytes x 9 rank(s) = {72 * GIB} bytes, and this node has {64 * GIB} bytes of memory"
    monkeypatch.setattr(store_config, "node_memory", lambda: GIB)
    with pytest.raises(SettingsError, match=f"this node has {GIB} bytes"):
        check_settings(EffectiveSettings(pool="127.0.0.1:1", segment_size=2 * GIB), "m")


def test_the_nodes_memory_is_the_lesser_of_ram_and_limit(tmp_path: Path) -> None:
    assert node_memory() > 0 and node_memory(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:       1048576 kB\nMemFree: 5 kB\n")
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert node_memory(tmp_path) == GIB
    (group / "memory.max").write_text("536870912\n")
    assert node_memory(tmp_path) == GIB // 2


# ---------------------------------------------------------------- run_dir


def settings_in(folder: Path) -> EffectiveSettings:
    return EffectiveSettings(
        pool="127.0.0.1:1", run_dir=str(folder), local_hostname="h", segment_size=0, role="producer", model_key="m"
    )


def test_the_files_of_a_worker(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "run")
    run_dir = RunDir.claim(settings)
    owner = json.loads((tmp_path / "run" / "owner.json").read_text())
    assert (owner["host"], owner["pid"], owner["role"]) == ("h", os.getpid(), "producer")
    manifest = Manifest("127.0.0.1:1", protocol="tcp")
    run_dir.write_config(settings, manifest, store_settings(settings, manifest))
    assert json.loads((tmp_path / "run" / "mooncake.json").read_text()) == {
        "master_server_address": "127.0.0.1:1",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": 0,
        "local_buffer_size": 1073741824,
        "role": "producer",
        "namespace": "trtllm",
        "transfer_batch_size": 64,
        "stage_through_host": True,
        "local_hostname": "h",
        "model_key": "m",
    }
    run_dir.release()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["mooncake.json"]


CLAIM = """
import sys
from mooncake_pool.store_config import EffectiveSettings, RunDir
RunDir.claim(EffectiveSettings(pool="127.0.0.1:1", run_dir=sys.argv[1]))
print("claimed", flush=True)
input()
"""


def test_workers_that_share_a_run_dir_do_not_share_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLAIM, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert json.loads((tmp_path / "owner.json").read_text())["pid"] == other.pid
        settings = settings_in(tmp_path)
        run_dir = RunDir.claim(settings)
        manifest = Manifest("127.0.0.1:1")
        run_dir.write_config(settings, manifest, store_settings(settings, manifest))
        mine = {f"owner.{os.getpid()}.json", f"mooncake.{os.getpid()}.json"}
        assert {path.name for path in tmp_path.iterdir()} == {"owner.json", *mine}
        other.kill()
        other.wait()
    RunDir.claim(settings)  # the dead owner's name is free
    assert json.loads((tmp_path / "owner.json").read_text())["pid"] == os.getpid()


def test_an_owner_on_another_machine_is_left_alone(tmp_path: Path) -> None:
    foreign = json.dumps({"host": "other", "pid": 1, "pid_start": 1, "machine": "another boot", "role": "both"})
    (tmp_path / "owner.json").write_text(foreign)
    RunDir.claim(settings_in(tmp_path))
    assert (tmp_path / "owner.json").read_text() == foreign


def test_a_run_dir_that_cannot_be_written_costs_only_the_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    settings = settings_in(tmp_path / "file" / "run")
    run_dir = RunDir.claim(settings)
    manifest = Manifest("127.0.0.1:1")
    run_dir.write_config(settings, manifest, store_settings(settings, manifest))
    run_dir.release()
    assert "no records will be there" in caplog.text
