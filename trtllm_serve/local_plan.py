"""What `trtllm-serve local` starts, decided from the disagg YAML alone. Pure: no process, no file."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvstore.errors import SettingsError
from kvstore.registry import Backend, ClusterAddress, parse_cluster_uri
from router.config import DisaggConfig

EMBEDDED = "embedded"
_ROLES = {"context": "context_servers", "generation": "generation_servers"}
_HOST = "127.0.0.1"  # of everything but the router


@dataclasses.dataclass(frozen=True)
class Paths:
    run_dir: Path

    @property
    def pool_file(self) -> Path:
        return self.run_dir / "pool.json"

    @property
    def pool_dir(self) -> Path:
        """The master's log and the workers' segment records: what mooncake_pool_report reads."""
        return self.run_dir / "pool"

    def config(self, name: str) -> Path:
        return self.run_dir / f"{name}.yaml"

    def log(self, name: str) -> Path:
        return self.run_dir / f"{name}.log"

    def address(self, name: str) -> Path:
        return self.run_dir / f"{name}.addr"


@dataclasses.dataclass(frozen=True)
class Child:
    """One process: the words after `trtllm-serve`, and the YAML for `Paths.config(name)`. With `reports_address` it
    writes host:port to `Paths.address(name)` and answers GET /health there."""

    name: str
    argv: tuple[str, ...]
    config: Mapping[str, Any] | None = None
    reports_address: bool = True


@dataclasses.dataclass(frozen=True)
class Worker:
    name: str
    role: str  # "context" | "generation"
    model: str  # path
    served_name: str | None  # None: the worker's own choice
    settings: Mapping[str, Any]  # engine keys of its block


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which parts there are. How each is called depends on addresses known when the parts before it run."""

    document: Mapping[str, Any]
    registry: ClusterAddress | None
    needs_master: bool
    workers: tuple[Worker, ...]
    paths: Paths
    log_level: str

    @property
    def router_hosts_registry(self) -> bool:
        return self.registry is not None and self.registry.backend is Backend.HTTP

    def master(self) -> Child:
        files = ("--run_dir", str(self.paths.pool_dir), "--pool_file", str(self.paths.pool_file))
        ports = ("--rpc_port", "0", "--metrics_port", "0")
        return Child("master", ("mooncake_master", "--protocol", "tcp", *ports, *files), reports_address=False)

    def worker(self, worker: Worker, cluster_uri: str | None) -> Child:
        """`cluster_uri`: the registry's real address; None without one."""
        name, settings = worker.name, dict(worker.settings)
        argv = ["serve", worker.model, "--server_role", worker.role, "--config", str(self.paths.config(name))]
        argv += ["--host", _HOST, "--port", "0", "--report_addr", str(self.paths.address(name))]
        argv += ["--log_level", self.log_level]
        if worker.served_name:
            argv += ["--served_model_name", worker.served_name]
        if cluster_uri is not None:
            # In the file and not in argv: it may hold a password.
            settings["disagg_cluster"] = {**self.document["disagg_cluster"], "cluster_uri": cluster_uri}
        return Child(name, tuple(argv), settings)

    def router(self, cluster_uri: str | None, worker_addresses: Mapping[str, str]) -> Child:
        """`worker_addresses`: host:port by worker name; only read without a registry."""
        document = copy.deepcopy(dict(self.document))
        if cluster_uri is not None:
            document["disagg_cluster"]["cluster_uri"] = cluster_uri
        else:
            for role, section in _ROLES.items():
                urls = [worker_addresses[worker.name] for worker in self.workers if worker.role == role]
                if urls:
                    document[section] = {**(document.get(section) or {}), "urls": urls, "num_instances": len(urls)}
        for section in _ROLES.values():
            (document.get(section) or {}).pop("model", None)
        document["model"] = self.workers[0].model  # the router reads prompts with its tokenizer
        files = ("-c", str(self.paths.config("router")), "--report_addr", str(self.paths.address("router")))
        return Child("router", ("disaggregated", *files, "--log_level", self.log_level), document)


def make_plan(
    document: Mapping[str, Any],
    config: DisaggConfig,
    paths: Paths,
    *,
    cores: int,
    resolve_model: Callable[[str], str],
    model: str | None = None,
    log_level: str = "info",
) -> Plan:
    """`document` is the parsed YAML that `config` was read from, overrides applied. `model` wins over the file's;
    `resolve_model` gives the path behind a model's name.

    SettingsError when there is nothing to start, or a started worker has no model.
    """
    blocks = [
        (role, block)
        for role, block in (("context", config.context), ("generation", config.generation))
        if block.present and not block.urls
    ]
    total = sum(block.num_instances for _, block in blocks)
    if not total:
        reason = "nothing to start here: both list urls, or are missing; `trtllm-serve disaggregated` is the router"
        raise SettingsError([("context_servers, generation_servers", reason)])
    threads = max(1, cores // total)
    workers: list[Worker] = []
    for role, block in blocks:
        name = model or block.engine.get("model")
        if not isinstance(name, str):
            raise SettingsError([(f"{_ROLES[role]}.model", "missing: give it here, at top level, or with --model")])
        settings = {"cpu_threads": threads, **_with_pool(block.engine, paths)}
        settings.pop("model", None)
        path = resolve_model(name)
        served = name if path != name and "served_model_name" not in settings else None
        workers += [Worker(f"{role}-{i}", role, path, served, settings) for i in range(block.num_instances)]
    return Plan(
        document=_map_pools(document, paths),
        registry=parse_cluster_uri(config.cluster.cluster_uri) if config.cluster else None,
        needs_master=any(_wants_embedded_pool(block.engine) for _, block in blocks),
        workers=tuple(workers),
        paths=paths,
        log_level=log_level,
    )


def _map_pools(document: Mapping[str, Any], paths: Paths) -> dict[str, Any]:
    changed = _with_pool(document, paths)
    for section in _ROLES.values():
        if isinstance(changed.get(section), Mapping):
            changed[section] = _with_pool(changed[section], paths)
    return changed


def _wants_embedded_pool(settings: Mapping[str, Any]) -> bool:
    connector = settings.get("kv_connector_config")
    store = connector.get("mooncake_store") if isinstance(connector, Mapping) else None
    return isinstance(store, Mapping) and store.get("pool") == EMBEDDED


def _with_pool(settings: Mapping[str, Any], paths: Paths) -> dict[str, Any]:
    """`settings` with `pool: embedded` replaced by the manifest of the master started here."""
    changed = dict(settings)
    if _wants_embedded_pool(settings):
        connector = dict(changed["kv_connector_config"])
        connector["mooncake_store"] = {
            "run_dir": str(paths.pool_dir),
            **connector["mooncake_store"],
            "pool": f"file://{paths.pool_file}",
        }
        changed["kv_connector_config"] = connector
    return changed
