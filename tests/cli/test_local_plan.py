"""What the local launcher would start, from a disagg YAML. No process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.errors import SettingsError
from router.config import parse_config
from trtllm_serve.local_plan import Child, Paths, Plan, make_plan

ROOT = Path(__file__).resolve().parent.parent.parent
PATHS = Paths(Path("/run"))
POOL = {"connector": "mooncake-store", "mooncake_store": {"pool": "embedded", "segment_size": "64MiB"}}
SMALL: dict[str, Any] = {
    "hostname": "127.0.0.1",
    "port": 0,
    "model": "m",
    "context_servers": {"num_instances": 1},
    "generation_servers": {"num_instances": 2},
    "disagg_cluster": {"cluster_uri": "redis://embedded", "cluster_name": "c", "heartbeat_interval_sec": 1},
}


def plan(document: dict[str, Any], cores: int = 8, model: str | None = None, **more: Any) -> Plan:
    before = copy.deepcopy(document)
    made = make_plan(
        document, parse_config(document), PATHS, cores=cores, model=model, resolve_model=lambda name: name, **more
    )
    assert document == before, "the caller's document was changed"
    return made


def changed(**keys: Any) -> dict[str, Any]:
    return {key: value for key, value in (SMALL | keys).items() if value is not None}


def option(child: Child, name: str) -> str:
    return child.argv[child.argv.index(name) + 1]


def test_one_worker_for_each_instance() -> None:
    made = plan(SMALL)
    assert [(worker.name, worker.role) for worker in made.workers] == [
        ("context-0", "context"), ("generation-0", "generation"), ("generation-1", "generation"),
    ]  # fmt: skip
    assert not made.needs_master and not made.router_hosts_registry


def test_a_workers_command_and_file() -> None:
    made = plan(changed(max_batch_size=4, context_servers={"num_instances": 1, "max_num_tokens": 32}))
    child = made.worker(made.workers[0], "redis://127.0.0.1:7/0")
    assert child.argv[:2] == ("serve", "m")
    assert option(child, "--server_role") == "context"
    assert option(child, "--host") == "127.0.0.1" and option(child, "--port") == "0"
    assert option(child, "--config") == "/run/context-0.yaml"
    assert option(child, "--report_addr") == "/run/context-0.addr"
    assert child.config == {
        "cpu_threads": 2,
        "max_batch_size": 4,
        "max_num_tokens": 32,
        "disagg_cluster": {"cluster_uri": "redis://127.0.0.1:7/0", "cluster_name": "c", "heartbeat_interval_sec": 1},
    }
    assert "--served_model_name" not in child.argv
    assert "max_num_tokens" not in (made.worker(made.workers[1], "redis://127.0.0.1:7/0").config or {})


def test_a_registrys_password_is_in_no_argument() -> None:
    made = plan(changed(disagg_cluster={"cluster_uri": "redis://:hunter2@h:1/0"}))
    assert made.registry is not None
    for child in [made.worker(made.workers[0], made.registry.url), made.router(made.registry.url, {})]:
        assert "hunter2" not in " ".join(child.argv)
        assert "hunter2" in str(child.config)


def test_the_routers_file_is_the_users_with_real_addresses() -> None:
    made = plan(changed(context_servers={"num_instances": 1, "router": {"type": "round_robin"}, "model": "m"}))
    child = made.router("redis://127.0.0.1:7/0", {})
    assert child.argv[0] == "disaggregated"
    assert option(child, "-c") == "/run/router.yaml" and option(child, "--report_addr") == "/run/router.addr"
    assert child.config is not None
    assert child.config["disagg_cluster"]["cluster_uri"] == "redis://127.0.0.1:7/0"
    assert child.config["context_servers"] == {"num_instances": 1, "router": {"type": "round_robin"}}
    assert "urls" not in str(child.config)
    parse_config(child.config)


def test_without_a_registry_the_router_gets_urls() -> None:
    made = plan(changed(disagg_cluster=None, generation_servers={"urls": ["10.0.0.1:9"], "num_instances": 1}))
    assert [worker.name for worker in made.workers] == ["context-0"]
    assert made.worker(made.workers[0], None).config == {"cpu_threads": 8}
    child = made.router(None, {"context-0": "127.0.0.1:5"})
    assert child.config is not None
    assert child.config["context_servers"]["urls"] == ["127.0.0.1:5"]
    assert child.config["generation_servers"]["urls"] == ["10.0.0.1:9"]
    parse_config(child.config)


def test_a_router_can_host_the_registry() -> None:
    made = plan(changed(disagg_cluster={"cluster_uri": "http://127.0.0.1:8000"}))
    assert made.router_hosts_registry
    worker = made.worker(made.workers[0], "http://127.0.0.1:4711")
    assert worker.config is not None
    assert worker.config["disagg_cluster"]["cluster_uri"] == "http://127.0.0.1:4711"


@pytest.mark.parametrize("where", ["top", "block"])
def test_an_embedded_pool_is_a_master_and_its_manifest(where: str) -> None:
    made = plan(
        changed(kv_connector_config=POOL)
        if where == "top"
        else changed(context_servers={"num_instances": 1, "kv_connector_config": POOL})
    )
    assert made.needs_master
    master = made.master()
    assert master.argv[0] == "mooncake_master" and option(master, "--protocol") == "tcp"
    assert option(master, "--pool_file") == "/run/pool.json" and option(master, "--run_dir") == "/run/pool"
    expected = {"pool": "file:///run/pool.json", "segment_size": "64MiB", "run_dir": "/run/pool"}
    with_pool = [worker for worker in made.workers if "kv_connector_config" in worker.settings]
    assert len(with_pool) == (3 if where == "top" else 1)
    for worker in with_pool:
        assert worker.settings["kv_connector_config"]["mooncake_store"] == expected
    router = made.router("redis://h:1/0", {}).config
    assert router is not None
    assert "embedded" not in str(router)
    parse_config(router)


def test_a_pool_elsewhere_is_left_alone() -> None:
    connector = {"connector": "mooncake-store", "mooncake_store": {"pool": "file:///elsewhere/pool.json"}}
    made = plan(changed(kv_connector_config=connector))
    assert not made.needs_master
    assert made.workers[0].settings["kv_connector_config"] == connector


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (8, 2), (96, 32)])
def test_cores_are_shared_out(cores: int, threads: int) -> None:
    assert {worker.settings["cpu_threads"] for worker in plan(SMALL, cores).workers} == {threads}


def test_threads_that_are_set_stay() -> None:
    made = plan(changed(cpu_threads=3, context_servers={"num_instances": 1}))
    assert {worker.settings["cpu_threads"] for worker in made.workers} == {3}


def test_the_command_lines_model_wins_everywhere() -> None:
    made = plan(changed(generation_servers={"num_instances": 2, "model": "m"}), model="other")
    assert {worker.model for worker in made.workers} == {"other"}
    assert all("model" not in worker.settings for worker in made.workers)
    router = made.router("redis://h:1/0", {}).config
    assert router is not None
    assert router["model"] == "other" and "model" not in router["generation_servers"]


def test_an_alias_becomes_a_path_and_stays_the_served_name() -> None:
    config = parse_config(SMALL)
    made = make_plan(SMALL, config, PATHS, cores=1, resolve_model=lambda name: f"/models/{name}.gguf")
    child = made.worker(made.workers[0], None)
    assert child.argv[1] == "/models/m.gguf" and option(child, "--served_model_name") == "m"
    router = made.router("redis://h:1/0", {}).config
    assert router is not None and router["model"] == "/models/m.gguf"


def test_a_worker_without_a_model_is_an_error() -> None:
    with pytest.raises(SettingsError, match=r"context_servers\.model: missing"):
        plan(changed(model=None))


@pytest.mark.parametrize(
    "document",
    [
        {"hostname": "h"},
        {"model": "m", "context_servers": {"urls": ["a:1"]}, "generation_servers": {"urls": ["b:1"]}},
        {"model": "m", "context_servers": {"num_instances": 0}, "generation_servers": {"num_instances": 0}},
    ],
)
def test_nothing_to_start_is_an_error(document: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="nothing to start"):
        plan(document)


def test_the_shipped_file_is_a_whole_cluster() -> None:
    document = yaml.safe_load((ROOT / "configs" / "local.yaml").read_text())
    made = plan(document, cores=2)
    assert [worker.name for worker in made.workers] == ["context-0", "generation-0"]
    assert made.needs_master
    assert str(made.registry) == "redis://embedded"
    assert made.workers[0].settings["cpu_threads"] == 1
