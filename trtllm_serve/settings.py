"""Settings of `trtllm-serve serve`: defaults < --config < flags < --set, decided by where a value comes from.

Every problem of every layer is reported at once, with the key's path and its source.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from engine.config import EngineConfig, PoolConfig
from kvstore.errors import SettingsError
from kvstore.protocol import ServerRole
from trtllm_serve import settings_keys as keys

Problems = list[tuple[str, str]]

ROLES = {
    "context": ServerRole.CONTEXT,
    "generation": ServerRole.GENERATION,
    "aggregated": ServerRole.AGGREGATED,
}


class ClusterSettings(msgspec.Struct, frozen=True):
    """The `disagg_cluster` block, as far as a worker needs it. Times in seconds."""

    cluster_uri: str
    cluster_name: str = ""
    heartbeat_interval_sec: float = 5.0
    inactive_timeout_sec: float = 10.0


class ServerFlags(msgspec.Struct, frozen=True):
    """What only the command line sets."""

    host: str = "localhost"
    port: int = 8000
    server_role: str = "aggregated"
    served_model_name: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    report_addr: str | None = None
    log_level: str = "info"


class WorkerSettings(msgspec.Struct, frozen=True):
    """The effective configuration. `notes` are sentences for the log."""

    model: str
    flags: ServerFlags
    engine: EngineConfig
    cluster: ClusterSettings | None
    notes: list[str]
    reasoning_parser: str | None = None  # of openai_api.reasoning.FORMS
    internal_request_auth_key: str | None = None  # shared with the router, which signs hand-off parameters with it

    @property
    def role(self) -> ServerRole:
        return ROLES[self.flags.server_role]


class Layers:
    """Nested settings with the source of each value."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.problems: Problems = []
        self._sources: dict[str, str] = {}

    def add_file(self, path: str) -> None:
        try:
            content = yaml.safe_load(Path(path).read_text("utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            self.problems.append(("--config", f"{path}: {error}"))
            return
        if content is not None and not isinstance(content, dict):
            self.problems.append(("--config", f"{path}: must be a mapping of keys to values"))
            return
        for key, value in (content or {}).items():
            self.put(keys.ALIASES.get(str(key), str(key)), value, str(path))

    def add_flags(self, flags: Mapping[str, Any]) -> None:
        for name, value in flags.items():
            self.put(keys.ALIASES.get(name, name), value, f"--{name}")

    def add_assignments(self, assignments: Sequence[str]) -> None:
        """`PATH=YAML` texts of --set. The last of equal paths wins; a path above or below another is refused."""
        parsed: dict[str, Any] = {}
        for assignment in assignments:
            path, equals, value = assignment.partition("=")
            if not equals or not path or not all(path.split(".")):
                self.problems.append(("--set", f"{assignment!r}: must be PATH=VALUE"))
                continue
            try:
                parsed[path] = yaml.safe_load(value)
            except yaml.YAMLError as error:
                self.problems.append((path, f"--set: {value!r} is not YAML: {error}"))
        for path, value in parsed.items():
            top = path.partition(".")[0]
            above = next((other for other in parsed if path.startswith(other + ".")), None)
            if above is not None:
                self.problems.append((path, f"--set: contradicts --set {above}"))
            elif top in keys.NOT_BY_SET:
                self.problems.append((path, f"--set: not allowed, {keys.NOT_BY_SET[top]}"))
            elif not _known(path):
                self.problems.append((path, f"--set: no such setting{_similar(path)}"))
            else:
                self.put(path, value, "--set")

    def put(self, path: str, value: Any, source: str) -> None:
        """Replaces exactly what `path` names."""
        *blocks, name = path.split(".")
        here = self.values
        for block in blocks:
            inner = here.get(block)
            if not isinstance(inner, dict):
                inner = here[block] = {}
            here = inner
        here[name] = copy.deepcopy(value)
        self._sources = {known: kept for known, kept in self._sources.items() if not known.startswith(path + ".")}
        self._sources[path] = source

    def source(self, path: str) -> str:
        while path not in self._sources and "." in path:
            path = path.rpartition(".")[0]
        return self._sources.get(path, "default")

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """(path, value), closed blocks opened. A block that is not a mapping is a problem; null is an empty one."""
        yield from self._open_block("", self.values)

    def _open_block(self, prefix: str, block: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in block.items():
            path = f"{prefix}{name}"
            if path not in keys.BLOCKS or value is None:
                yield path, value
            elif isinstance(value, dict):
                yield from self._open_block(path + ".", value)
            else:
                self.problems.append((path, f"{value!r} must be a block of keys (from {self.source(path)})"))


def load_settings(
    model: str,
    *,
    config: str | None = None,
    flags: Mapping[str, Any] | None = None,
    assignments: Sequence[str] = (),
    cluster_uri: str | None = None,
    server: ServerFlags | None = None,
    environment: Mapping[str, str] | None = None,
) -> WorkerSettings:
    """SettingsError lists everything that is wrong. `flags` holds only those that were given on the command line."""
    layers = Layers()
    if (environment or {}).get("TRTLLM_DISAGG_FAULT_INJECTION") == "1":
        layers.put("fault_injection", True, "TRTLLM_DISAGG_FAULT_INJECTION")
    if config is not None:
        layers.add_file(config)
    layers.add_flags(flags or {})
    if cluster_uri is not None:
        layers.put("disagg_cluster.cluster_uri", cluster_uri, "--disagg_cluster_uri")
    layers.add_assignments(assignments)
    reader = _Reader(layers, server or ServerFlags())
    settings = reader.read(model)
    if layers.problems:
        raise SettingsError(layers.problems)
    return settings


class _Reader:
    """One pass over all values; problems go to the layers' list."""

    def __init__(self, layers: Layers, server: ServerFlags) -> None:
        self._layers = layers
        self._server = server
        self._problems = layers.problems
        self._engine: dict[str, Any] = {}
        self._store: dict[str, Any] = {}
        self._cluster: dict[str, Any] = {}
        self._unused: list[str] = []
        self._auth_key: str | None = None
        self._answers: dict[str, Any] = {}
        self.notes: list[str] = []

    def read(self, model: str) -> WorkerSettings:
        for path, value in self._layers.leaves():
            self._take(path, value)
        pool = self._pool()
        transfers = self._transfers(pool)
        cluster = self._cluster_settings()
        if self._unused:
            self.notes.append("settings without effect in this build: " + ", ".join(sorted(self._unused)))
        if self._problems:
            raise SettingsError(self._problems)
        engine = EngineConfig(
            model=model, role=self._server.server_role, pool=pool, transfers=transfers, **self._engine
        )
        return WorkerSettings(
            model, self._server, engine, cluster, self.notes, internal_request_auth_key=self._auth_key, **self._answers
        )

    def _take(self, path: str, value: Any) -> None:
        block, _, name = path.rpartition(".")
        if path in keys.ENGINE:
            field, parse = keys.ENGINE[path]
            self._parse(path, value, parse, self._engine, field)
        elif path in keys.CHECKED:
            self._parse(path, value, keys.CHECKED[path], {}, name)
        elif block == "kv_connector_config.mooncake_store" and name in keys.STORE:
            self._parse(path, value, keys.STORE[name], self._store, name)
        elif block == "disagg_cluster" and name in keys.CLUSTER:
            self._parse(path, value, keys.CLUSTER[name], self._cluster, name)
        elif path == "disagg_cluster.inactive_interval_sec":
            self.notes.append(f"{path} is read as disagg_cluster.inactive_timeout_sec")
            self._parse(path, value, keys.seconds, self._cluster, "inactive_timeout_sec")
        elif block in keys.BLOCKS and name not in keys.BLOCKS[block]:
            self._problem(path, f"no such setting{_similar(path)}")
        elif path in keys.EFFECTIVE_IN_BLOCKS or (path in keys.BLOCKS and value is None):
            pass
        elif path in keys.ANSWERS:
            self._parse(path, value, keys.ANSWERS[path], self._answers, path)
        elif path == "internal_request_auth_key":
            if value is not None and (not isinstance(value, str) or not value):
                self._problem(path, "must be text of at least 1 character")  # and is not shown
            self._auth_key = value
        elif block or path in keys.OPEN:
            self._unused.append(path)
        else:
            self.notes.append(f"unknown setting {path}{_similar(path)}: ignored")

    def _parse(self, path: str, value: Any, parse: keys.Parser, into: dict[str, Any], field: str) -> None:
        """null is the default; so is 0 where TensorRT-LLM writes 0 for "not set"."""
        if value is None or (field == "host_kv_bytes" and value == 0):
            return
        try:
            into[field] = parse(value)
        except ValueError as error:
            self._problem(path, f"{value!r} {error}")

    def _problem(self, path: str, message: str) -> None:
        source = self._layers.source(path)
        self._problems.append((path, message if source == "default" else f"{message} (from {source})"))

    # ------------------------------------------------------------ blocks with rules of their own

    def _pool(self) -> PoolConfig | None:
        connector = self._layers.values.get("kv_connector_config")
        if not connector:
            return None
        if not isinstance(connector, dict) or not isinstance(connector.get("mooncake_store"), dict):
            self._problem("kv_connector_config.mooncake_store", "missing: the block that names the pool")
            return None
        if connector.get("connector") is None:
            self._problem("kv_connector_config.connector", "missing; allowed: mooncake-store")
        if "pool" not in self._store:
            if connector["mooncake_store"].get("pool") is None:
                self._problem("kv_connector_config.mooncake_store.pool", "missing: file://MANIFEST or HOST:PORT")
            return None
        return PoolConfig(**self._store)

    def _transfers(self, pool: PoolConfig | None) -> tuple[str, ...]:
        """Hand-off paths for `cache_transceiver_config.backend`, fastest first."""
        path = "cache_transceiver_config.backend"
        block = self._layers.values.get("cache_transceiver_config")
        backend = block.get("backend", "DEFAULT") if isinstance(block, dict) else "DEFAULT"
        last: tuple[str, ...] = () if pool is None else ("pool",)
        match backend:
            case "DEFAULT":
                return ("shm", "nixl", *last)
            case "NIXL" | "UCX":
                self._engine["transfers_required"] = True
                return ("nixl", *last)
            case "MOONCAKE":
                self._engine["transfers_required"] = True
                return ("mooncake", *last)
            case "POOL":
                if not self._layers.values.get("kv_connector_config"):
                    self._problem(path, "POOL needs kv_connector_config with a mooncake_store block")
                return ("pool",)
            case "MPI":
                self._problem(path, "MPI is not supported: workers here are not ranks of one MPI job")
            case None if self._server.server_role == "aggregated":
                return ()
            case None:
                self._problem(path, f"null turns hand-offs off, but --server_role is {self._server.server_role}")
            case _:
                self._problem(path, f"{backend!r} must be one of DEFAULT, NIXL, UCX, MOONCAKE, POOL")
        return ()

    def _cluster_settings(self) -> ClusterSettings | None:
        if not self._layers.values.get("disagg_cluster"):
            return None
        if "cluster_uri" not in self._cluster:
            if not any(path == "disagg_cluster.cluster_uri" for path, _ in self._problems):
                self._problem("disagg_cluster.cluster_uri", "missing")
            return None
        if self._server.server_role == "aggregated":
            self._problems.append(("--server_role", "required with disagg_cluster: context or generation"))
        settings = ClusterSettings(**self._cluster)
        if settings.heartbeat_interval_sec >= settings.inactive_timeout_sec:
            self._problem(
                "disagg_cluster.heartbeat_interval_sec",
                f"{settings.heartbeat_interval_sec:g} must be below inactive_timeout_sec "
                f"({settings.inactive_timeout_sec:g}), or the record runs out between heartbeats",
            )
        return settings


def _every_path() -> set[str]:
    inner = {f"{block}.{name}" for block, names in keys.BLOCKS.items() for name in names}
    store = {f"kv_connector_config.mooncake_store.{name}" for name in keys.STORE}
    cluster = {f"disagg_cluster.{name}" for name in keys.CLUSTER}
    return {*keys.ENGINE, *keys.ANSWERS, *keys.CHECKED, *keys.OPEN, *keys.BLOCKS, *inner, *store, *cluster}


def _known(path: str) -> bool:
    """Below an open key anything goes: its inside is not looked at."""
    every = _every_path()
    return path in every or any(path.startswith(top + ".") for top in keys.OPEN)


def _similar(path: str) -> str:
    found = difflib.get_close_matches(path, _every_path(), n=1, cutoff=0.8)
    return f" (is {found[0]} meant?)" if found else ""
