"""Worker settings: precedence by source, closed blocks, all problems at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click.testing
import pytest
import yaml

from engine.config import EngineConfig
from kvstore.errors import SettingsError
from kvstore.protocol import ServerRole
from trtllm_serve import settings_keys as keys
from trtllm_serve.serve import serve
from trtllm_serve.settings import ServerFlags, WorkerSettings, load_settings

CONTEXT = ServerFlags(server_role="context")


def load(tmp_path: Path, document: Any = None, server: ServerFlags = CONTEXT, **others: Any) -> WorkerSettings:
    file = None
    if document is not None:
        file = tmp_path / "worker.yaml"
        file.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return load_settings("m", config=str(file) if file else None, server=server, **others)


def problems(tmp_path: Path, document: Any, **others: Any) -> dict[str, str]:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, document, **others)
    return dict(caught.value.problems)


def test_defaults_are_those_of_the_types(tmp_path: Path) -> None:
    settings = load(tmp_path, None, ServerFlags())
    assert settings.engine == EngineConfig(model="m", transfers=("shm", "nixl"))
    assert settings.cluster is None
    assert settings.role is ServerRole.AGGREGATED


def test_precedence_is_by_source(tmp_path: Path) -> None:
    """A flag that repeats the default still goes before the file."""
    default = EngineConfig("m").max_batch_size
    document = {"max_batch_size": 7, "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 100}}
    assert load(tmp_path, document).engine.max_batch_size == 7
    assert load(tmp_path, document, flags={"max_batch_size": default}).engine.max_batch_size == default
    both = load(tmp_path, document, flags={"max_batch_size": 8}, assignments=["max_batch_size=9"])
    assert both.engine.max_batch_size == 9
    assert (both.engine.tokens_per_block, both.engine.max_tokens) == (16, 100)


def test_an_assignment_replaces_exactly_its_value(tmp_path: Path) -> None:
    document = {"kv_cache_config": {"tokens_per_block": 16, "max_tokens": 100}}
    one = load(tmp_path, document, assignments=["kv_cache_config.max_tokens=200"]).engine
    assert (one.tokens_per_block, one.max_tokens) == (16, 200)
    whole = load(tmp_path, document, assignments=["kv_cache_config={max_tokens: 300}"]).engine
    assert (whole.tokens_per_block, whole.max_tokens) == (EngineConfig("m").tokens_per_block, 300)
    last = load(tmp_path, document, assignments=["max_num_tokens=1", "max_num_tokens=64"]).engine
    assert last.max_num_tokens == 64


def test_flag_names_of_nested_settings(tmp_path: Path) -> None:
    engine = load(tmp_path, {"free_gpu_memory_fraction": 0.3}).engine
    assert engine.free_gpu_memory_fraction == 0.3
    engine = load(tmp_path, {"free_gpu_memory_fraction": 0.3}, flags={"free_gpu_memory_fraction": 0.5}).engine
    assert engine.free_gpu_memory_fraction == 0.5


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("max_batch_size", "PATH=VALUE"),
        ("=5", "PATH=VALUE"),
        ("a..b=5", "PATH=VALUE"),
        ("backend=pytorch", "use --backend"),
        ("disagg_cluster.cluster_uri=redis://h:1/0", "use --disagg_cluster_uri"),
        ("model=x", "use MODEL"),
        ("max_batch_sise=5", "max_batch_size"),
        ("kv_cache_config.max_token=5", "kv_cache_config.max_tokens"),
        ("max_batch_size=[", "not YAML"),
    ],
)
def test_bad_assignments(tmp_path: Path, assignment: str, says: str) -> None:
    (message,) = problems(tmp_path, None, assignments=[assignment]).values()
    assert says in message


def test_assignments_must_not_overlap(tmp_path: Path) -> None:
    found = problems(tmp_path, None, assignments=["kv_cache_config={}", "kv_cache_config.max_tokens=5"])
    assert "contradicts" in found["kv_cache_config.max_tokens"]


def test_all_problems_at_once_with_path_value_and_source(tmp_path: Path) -> None:
    document = {
        "max_batch_size": "many",
        "kv_cache_config": {"tokens_per_blok": 16, "max_tokens": 0, "free_gpu_memory_fraction": 1.5},
        "cache_transceiver_config": {"backend": "MPI", "colour": 1},
        "disagg_cluster": {"cluster_name": 5, "heartbeat": 3},
        "tensor_parallel_size": 0,
    }
    found = problems(tmp_path, document, flags={"max_num_tokens": -1})
    assert set(found) == {
        "max_batch_size",
        "kv_cache_config.tokens_per_blok",
        "kv_cache_config.max_tokens",
        "kv_cache_config.free_gpu_memory_fraction",
        "cache_transceiver_config.backend",
        "cache_transceiver_config.colour",
        "disagg_cluster.cluster_name",
        "disagg_cluster.heartbeat",
        "disagg_cluster.cluster_uri",
        "tensor_parallel_size",
        "max_num_tokens",
    }
    assert "tokens_per_block" in found["kv_cache_config.tokens_per_blok"]
    assert "'many'" in found["max_batch_size"] and "worker.yaml" in found["max_batch_size"]
    assert "--max_num_tokens" in found["max_num_tokens"]


@pytest.mark.parametrize("text", ["- a\n", "a: [", "just text"])
def test_files_that_are_no_settings(tmp_path: Path, text: str) -> None:
    assert "--config" in problems(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.yaml"):
        load_settings("m", config=str(tmp_path / "nowhere.yaml"))


def test_empty_files_and_null_blocks_are_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "").engine == load(tmp_path).engine
    document = {"kv_cache_config": None, "cache_transceiver_config": None, "disagg_cluster": None, "max_seq_len": None}
    assert load(tmp_path, document).engine == load(tmp_path).engine


def test_settings_without_effect_are_named_once(tmp_path: Path) -> None:
    document = {
        "cuda_graph_config": "None",
        "moe_config": {"backend": "CUTLASS"},
        "kv_cache_config": {"copy_on_partial_reuse": False, "use_kv_cache_manager_v2": True},
        "backend": "pytorch",
        "not_a_key": 1,
        "max_batchsize": 4,
    }
    notes = load(tmp_path, document).notes
    without = next(note for note in notes if "without effect" in note)
    for name in ("cuda_graph_config", "moe_config", "kv_cache_config.copy_on_partial_reuse"):
        assert name in without
    assert "backend" not in without.replace("moe_backend", "")
    assert any("not_a_key" in note for note in notes)
    assert any("max_batchsize" in note and "max_batch_size" in note for note in notes)


# ---------------------------------------------------------------------- hand-off paths and the pool

POOL = {"connector": "mooncake-store", "mooncake_store": {"pool": "file:///p.json", "model_key": "k"}}


@pytest.mark.parametrize(
    ("backend", "pool", "transfers"),
    [
        ("DEFAULT", False, ("shm", "nixl")),
        ("DEFAULT", True, ("shm", "nixl", "pool")),
        ("NIXL", True, ("nixl", "pool")),
        ("UCX", False, ("nixl",)),
        ("MOONCAKE", False, ("mooncake",)),
        ("MOONCAKE", True, ("mooncake", "pool")),
        ("POOL", True, ("pool",)),
        (..., True, ("shm", "nixl", "pool")),
    ],
)
def test_backends(tmp_path: Path, backend: Any, pool: bool, transfers: tuple[str, ...]) -> None:
    document: dict[str, Any] = {"kv_connector_config": POOL} if pool else {}
    if backend is not ...:
        document["cache_transceiver_config"] = {
            "backend": backend,
            "kv_transfer_timeout_ms": 1500,
            "kv_transfer_poll_interval_ms": 5,
            "max_tokens_in_buffer": 4096,
        }
    settings = load(tmp_path, document)
    assert settings.engine.transfers == transfers
    assert (settings.engine.pool is not None) == pool
    assert settings.engine.transfers_required == (backend in ("NIXL", "UCX", "MOONCAKE"))
    if backend is not ...:
        assert settings.engine.handoff_timeout == 1.5
        assert (settings.engine.transfer_poll_interval, settings.engine.max_tokens_in_buffer) == (0.005, 4096)


@pytest.mark.parametrize("backend", ["POOL", "MPI", "nixl", 5, None])
def test_backends_that_cannot_be(tmp_path: Path, backend: Any) -> None:
    found = problems(tmp_path, {"cache_transceiver_config": {"backend": backend}})
    assert set(found) == {"cache_transceiver_config.backend"}


def test_no_hand_off_is_fine_for_a_server_of_its_own(tmp_path: Path) -> None:
    settings = load(tmp_path, {"cache_transceiver_config": {"backend": None}}, ServerFlags())
    assert settings.engine.transfers == ()


def test_pool_settings(tmp_path: Path) -> None:
    store = POOL["mooncake_store"] | {  # type: ignore[operator]
        "segment_size": "64MiB",
        "role": "capacity",
        "stage_through_host": True,
        "master_timeout": 5,
    }
    pool = load(tmp_path, {"kv_connector_config": {"connector": "mooncake-store", "mooncake_store": store}}).engine.pool
    assert pool is not None
    assert (pool.pool, pool.segment_size, pool.role, pool.master_timeout) == (
        "file:///p.json",
        64 << 20,
        "capacity",
        5.0,
    )


@pytest.mark.parametrize(
    ("connector", "path"),
    [
        ({"connector": "lmcache", "mooncake_store": {"pool": "h:1"}}, "kv_connector_config.connector"),
        ({"mooncake_store": {"pool": "h:1"}}, "kv_connector_config.connector"),
        ({"connector": "mooncake-store"}, "kv_connector_config.mooncake_store"),
        ({"connector": "mooncake-store", "mooncake_store": {}}, "kv_connector_config.mooncake_store.pool"),
        (
            {"connector": "mooncake-store", "mooncake_store": {"pool": "h:1", "segment_size": "1GB"}},
            "kv_connector_config.mooncake_store.segment_size",
        ),
        (
            {"connector": "mooncake-store", "mooncake_store": {"pool": "h:1", "colour": 1}},
            "kv_connector_config.mooncake_store.colour",
        ),
    ],
)
def test_bad_pool_settings(tmp_path: Path, connector: dict[str, Any], path: str) -> None:
    assert set(problems(tmp_path, {"kv_connector_config": connector})) == {path}


@pytest.mark.parametrize(
    ("text", "size"), [(5, 5), ("1KiB", 1024), ("1.5 MiB", 3 << 19), ("2GiB", 2 << 30), ("1TiB", 1 << 40)]
)
def test_sizes(text: Any, size: int) -> None:
    assert keys.size(text) == size


@pytest.mark.parametrize("text", ["1GB", "1G", "1", "GiB", -1, 1.5, None, "-1MiB", True])
def test_bad_sizes(text: Any) -> None:
    with pytest.raises(ValueError, match="KiB"):
        keys.size(text)


# ---------------------------------------------------------------------- cluster


def test_cluster(tmp_path: Path) -> None:
    document = {"disagg_cluster": {"cluster_uri": "redis://a:1/0", "inactive_interval_sec": 9, "minimal_instances": {}}}
    settings = load(tmp_path, document)
    assert settings.cluster is not None
    assert (settings.cluster.cluster_uri, settings.cluster.inactive_timeout_sec) == ("redis://a:1/0", 9.0)
    assert any("inactive_timeout_sec" in note for note in settings.notes)
    over = load(tmp_path, document, cluster_uri="redis://b:2/0").cluster
    assert over is not None
    assert over.cluster_uri == "redis://b:2/0"
    assert over.inactive_timeout_sec == 9.0


def test_cluster_needs_a_role_and_time_to_beat(tmp_path: Path) -> None:
    document = {"disagg_cluster": {"cluster_uri": "u", "heartbeat_interval_sec": 5, "inactive_timeout_sec": 5}}
    found = problems(tmp_path, document, server=ServerFlags())
    assert set(found) == {"--server_role", "disagg_cluster.heartbeat_interval_sec"}


def test_fault_injection_from_the_environment(tmp_path: Path) -> None:
    on = {"TRTLLM_DISAGG_FAULT_INJECTION": "1"}
    assert load(tmp_path, environment=on).engine.fault_injection
    assert not load(tmp_path, environment={}).engine.fault_injection
    assert not load(tmp_path, {"fault_injection": False}, environment=on).engine.fault_injection


# ---------------------------------------------------------------------- command line


def flags_of(monkeypatch: pytest.MonkeyPatch, *argv: str) -> WorkerSettings:
    """The settings that the command would serve with."""
    seen: list[WorkerSettings] = []

    def remember(settings: WorkerSettings) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr("trtllm_serve.serve._serve_until_end", remember)
    result = click.testing.CliRunner().invoke(serve, argv, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = flags_of(
        monkeypatch, "m", "--host", "0.0.0.0", "--port", "0", "--server_role", "CONTEXT", "--max_batch_size", "3",
        "--tp_size", "1", "--no-telemetry", "--set", "max_num_tokens=33", "--kv_cache_dtype", "auto",
        "--custom_module_dirs", "a", "--custom_module_dirs", "b", "--trust_remote_code", "--served_model_name", "s",
        "--disagg_cluster_uri", "redis://h:1/0", "--report_addr", str(tmp_path / "r"),
    )  # fmt: skip
    assert (settings.flags.host, settings.flags.port, settings.flags.server_role) == ("0.0.0.0", 0, "context")
    assert (settings.engine.max_batch_size, settings.engine.max_num_tokens) == (3, 33)
    assert settings.engine.custom_module_dirs == ("a", "b")
    assert settings.cluster is not None
    assert any("trust_remote_code" in note for note in settings.notes)


def test_flags_left_out_leave_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = flags_of(monkeypatch, "m")
    assert settings.flags == ServerFlags()
    assert settings.engine == EngineConfig("m", transfers=("shm", "nixl"))
    assert settings.notes == []


def test_help_needs_nothing_heavy() -> None:
    result = click.testing.CliRunner().invoke(serve, ["--help"])
    assert result.exit_code == 0
    assert "--server_role" in result.output


def test_scheduler_and_cache_keys_reach_the_engine(tmp_path: Path) -> None:
    document = {
        "scheduler_config": {
            "capacity_scheduler_policy": "MAX_UTILIZATION", "waiting_queue_policy": "priority",
            "context_chunking_policy": "EQUAL_PROGRESS",
        },
        "kv_cache_config": {"host_cache_size": "1GiB", "event_buffer_max_size": 1024, "enable_partial_reuse": False},
        "enable_iter_perf_stats": True, "iter_perf_stats_interval": 4, "return_perf_metrics": True,
    }  # fmt: skip
    engine = load(tmp_path, document).engine
    assert (engine.capacity_policy, engine.waiting_policy) == ("MAX_UTILIZATION", "priority")
    assert engine.chunking_policy == "EQUAL_PROGRESS"
    assert (engine.host_cache_size, engine.event_buffer_max_size, engine.enable_partial_reuse) == (2**30, 1024, False)
    assert (engine.enable_iter_perf_stats, engine.iter_perf_stats_interval) == (True, 4)
    assert engine.return_perf_metrics


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("capacity_scheduler_policy", "STATIC_BATCH", "GUARANTEED_NO_EVICT"),
        ("context_chunking_policy", "FORCE_CHUNK", "EQUAL_PROGRESS"),
        ("waiting_queue_policy", "lifo", "fcfs, priority"),
    ],
)
def test_policies_that_are_not_there_are_refused_by_name(tmp_path: Path, key: str, value: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, {"scheduler_config": {key: value}})
    [(path, message)] = caught.value.problems
    assert path == f"scheduler_config.{key}" and value in message and allowed in message


def test_the_reasoning_parser_is_a_setting_of_file_and_flag(tmp_path: Path) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("reasoning_parser: qwen3\n")
    assert load_settings("tiny").reasoning_parser is None
    assert load_settings("tiny", config=str(file)).reasoning_parser == "qwen3"
    assert load_settings("tiny", config=str(file), flags={"reasoning_parser": "deepseek-r1"}).reasoning_parser == (
        "deepseek-r1"
    )
    with pytest.raises(SettingsError, match=r"reasoning_parser.*deepseek-r1, qwen3"):
        load_settings("tiny", assignments=["reasoning_parser=thoughts"])
