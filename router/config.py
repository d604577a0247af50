"""The disagg YAML as frozen values.

Loading is as forgiving as TensorRT-LLM's where that is safe (unknown keys belong to the engine) and strict in the
closed `disagg_cluster` block. Every problem of a file is reported at once, with its YAML path.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvstore.errors import SettingsError
from kvstore.protocol import join_address
from kvstore.registry import parse_cluster_uri
from router.config_reader import Reader
from router.ids import MAX_NODE_ID, default_node_id

PREFIX_AWARE = ("kv_cache_aware", "least_time")
SCHEDULE_STYLES = ("context_first", "generation_first")
ROUTER_TYPES = ("round_robin", "load_balancing", "kv_cache_aware", "conversation", "least_time")


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """The `router` map of a server block."""

    type: str = "round_robin"
    use_tokens: bool = False  # load_balancing: load is prompt tokens and not requests
    max_batch_size: int = 64  # kv_cache_aware: a worker's batch, for load_cap
    tokens_per_block: int | None = None  # None: the workers'
    load_weight: float = 0.25  # blocks of match that one active request costs
    load_cap: float = math.inf  # share of max_batch_size above which a worker is passed over
    track_routed_blocks: bool = True  # count on a routed prompt's blocks before the worker's events say so
    tokenizer_dir: str | None = None
    model_path: str | None = None
    work_weight: float = 3.0  # least_time: seconds that a second of computing counts for; above 1: it delays others too
    recent_weight: float = 0.03  # least_time: seconds that a second of recently given work counts for
    match_threshold: float = 0.75  # conversation: share of a request's text that makes it a known conversation's
    use_token_ids: bool = False  # conversation: compare token ids and not text
    hash_skip_count: int = 0  # conversation: blocks at the start that are the same for all
    max_sessions: int = 100_000  # conversation: the least recently used ones are forgotten
    pool: bool = False  # the workers have a pool in common


@dataclasses.dataclass(frozen=True)
class ServerBlock:
    """`context_servers` or `generation_servers`. `engine` holds the keys of the workers themselves."""

    num_instances: int = 1
    urls: tuple[tuple[str, int], ...] = ()  # host, port
    router: RouterConfig = RouterConfig()
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    present: bool = False


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """The `disagg_cluster` block."""

    cluster_uri: str
    cluster_name: str = ""
    minimal_context: int = 1
    minimal_generation: int = 1
    heartbeat_interval_sec: int = 5
    inactive_timeout_sec: int = 10


@dataclasses.dataclass(frozen=True)
class AdmissionConfig:
    """The `admission` block: what waits before prefill, and what is refused."""

    max_queue_size: int = 1024  # requests that wait; more: 429
    queue_timeout_sec: float = 30.0  # a request waits so long at most: 503
    saturation: float = 4.0  # requests in flight for each place in the workers' batches (max_batch_size), by role


@dataclasses.dataclass(frozen=True)
class DisaggConfig:
    context: ServerBlock = ServerBlock()
    generation: ServerBlock = ServerBlock()
    hostname: str = "localhost"
    port: int = 8000
    max_retries: int = 1  # further attempts of a request, each with other workers and a fresh id
    schedule_style: str = "context_first"
    cluster: ClusterConfig | None = None
    node_id: int = dataclasses.field(default_factory=default_node_id)
    allow_request_chat_template: bool = False
    server_keep_alive_timeout: int = 10  # seconds
    max_local_prefill_length: int | None = None  # conditional_disagg_config; None: every prompt has a context worker
    internal_request_auth_key: str | None = None  # shared with the workers: hand-off parameters are signed
    api_keys_file: str | None = None  # one key a line, read again when it changes; None: no key is asked for
    cors_allow_origins: tuple[str, ...] = ()  # "*": any
    admission: AdmissionConfig = AdmissionConfig()
    warnings: tuple[str, ...] = ()


_NOT_BUILT_FATAL = ("disagg_coordinator_url",)
"""Leaving these out would change who answers."""

_NOT_BUILT_HARMLESS = {
    "otlp_config": "no traces are exported",
    "perf_metrics_output_dir": "no records are written",
    "perf_metrics_max_requests": "records are not kept; ask for a request's times with X-TRTLLM-return-metrics: 1",
    "return_perf_metrics": "ask for a request's times with the header X-TRTLLM-return-metrics: 1",
    "gen_strip_message_history": "the generation leg carries the whole conversation",
    "gen_tokids_ctxbytes": "token ids travel as JSON lists",
    "conversation_affinity_header_for_subagents": "conversations are not pinned",
    "subagent_affinity_scope": "conversations are not pinned",
}
"""The same answers without these, so a file that has them runs; what happens instead is said in a warning."""

_ELSEWHERE = ("context", "generation", "cluster", "max_local_prefill_length", "warnings")
_BLOCKS = ("context_servers", "generation_servers", "disagg_cluster", "conditional_disagg_config")
_KNOWN = frozenset(
    [field.name for field in dataclasses.fields(DisaggConfig) if field.name not in _ELSEWHERE]
    + [*_BLOCKS, "num_workers", "env_overrides", "telemetry_config", *_NOT_BUILT_FATAL, *_NOT_BUILT_HARMLESS]
)
ROUTER_KEYS = tuple(field.name for field in dataclasses.fields(RouterConfig) if field.name != "pool")


def load_config(path: str, overrides: Mapping[str, Any] | None = None) -> DisaggConfig:
    """Read a YAML file. `overrides` (top-level keys from the command line) win. Raises SettingsError."""
    try:
        document = yaml.safe_load(Path(path).read_text("utf-8"))
    except OSError as error:
        raise SettingsError([(path, error.strerror or str(error))]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError([(path, f"not YAML: {error}")]) from None
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise SettingsError([(path, f"the file holds a {type(document).__name__}, not a mapping of keys")])
    return parse_config(document, overrides)


def parse_config(document: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> DisaggConfig:
    """Raises SettingsError with all problems found."""
    top = Reader("", {**document, **(overrides or {})})
    node_id = top.integer("node_id", default_node_id(), low=0)
    if node_id > MAX_NODE_ID:
        top.problem("node_id", f"must be in range [0, {MAX_NODE_ID + 1}), got {node_id}")
    _refuse_what_is_not_built(top)
    cluster = _cluster(top)
    inherited = {key: value for key, value in top.values.items() if key not in _KNOWN}
    config = DisaggConfig(
        context=_server_block(top, "context_servers", inherited),
        generation=_server_block(top, "generation_servers", inherited),
        hostname=top.text("hostname", DisaggConfig.hostname),
        port=top.integer("port", DisaggConfig.port, low=0),
        max_retries=top.integer("max_retries", DisaggConfig.max_retries, low=0),
        schedule_style=top.choice("schedule_style", "context_first", SCHEDULE_STYLES),
        cluster=cluster,
        node_id=node_id,
        allow_request_chat_template=top.boolean("allow_request_chat_template", False),
        server_keep_alive_timeout=top.integer("server_keep_alive_timeout", 10, low=1),
        max_local_prefill_length=_conditional(top),
        internal_request_auth_key=_secret(top, "internal_request_auth_key"),
        api_keys_file=top.text_or_none("api_keys_file", None),
        cors_allow_origins=_texts(top, "cors_allow_origins"),
        admission=_admission(top),
        warnings=tuple(top.warnings),
    )
    if config.max_local_prefill_length is not None and config.generation.router.type not in PREFIX_AWARE:
        top.problem(
            "conditional_disagg_config", f"needs a generation_servers.router of type {' or '.join(PREFIX_AWARE)}"
        )
    if config.port > 65535:
        top.problem("port", f"{config.port} is not a port number")
    if top.problems:
        raise SettingsError(top.problems)
    return config


def _conditional(top: Reader) -> int | None:
    block = top.block("conditional_disagg_config")
    if block is None:
        return None
    block.close("ConditionalDisaggConfig", ("max_local_prefill_length",))
    return block.integer("max_local_prefill_length", 0, low=0)


def _secret(top: Reader, key: str) -> str | None:
    if top.values.get(key) == "":
        top.problem(key, "must have at least 1 character")
    value = top.values.get(key)
    if value is not None and not isinstance(value, str):
        top.problem(key, "must be text")  # and never shown
        return None
    return value or None


def _texts(top: Reader, key: str) -> tuple[str, ...]:
    value = top.values.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        top.problem(key, f"must be a list of texts, got {value!r}")
        return ()
    return tuple(value)


def _admission(top: Reader) -> AdmissionConfig:
    block = top.block("admission")
    if block is None:
        return AdmissionConfig()
    block.close("AdmissionConfig", [field.name for field in dataclasses.fields(AdmissionConfig)])
    config = AdmissionConfig(
        max_queue_size=block.integer("max_queue_size", AdmissionConfig.max_queue_size, low=0),
        queue_timeout_sec=block.number("queue_timeout_sec", AdmissionConfig.queue_timeout_sec),
        saturation=block.number("saturation", AdmissionConfig.saturation),
    )
    if config.saturation == 0:
        block.problem("saturation", "must be above 0")
    return config


def require_workers(config: DisaggConfig) -> None:
    """A router that starts no workers must be told where they are. Raises SettingsError."""
    if config.cluster is not None:
        return
    problems = [
        (f"{name}.urls", "missing: list the workers' host:port here, or give a disagg_cluster")
        for name, block in (("context_servers", config.context), ("generation_servers", config.generation))
        if not block.urls
    ]
    if problems:
        raise SettingsError(problems)


def _refuse_what_is_not_built(top: Reader) -> None:
    for key in _NOT_BUILT_FATAL:
        if top.values.get(key) is not None:
            top.problem(key, "not in this build")
    if top.integer("num_workers", 1, low=1) > 1:
        top.problem("num_workers", f"{top.values['num_workers']}: this build runs one router process")
    for key, instead in _NOT_BUILT_HARMLESS.items():
        if top.values.get(key) not in (None, False, 0):
            top.warn(key, f"not in this build: {instead}")
    for key in ("env_overrides", "telemetry_config"):
        if top.values.get(key):
            top.warn(key, "has no effect on the router")


def _server_block(top: Reader, name: str, inherited: Mapping[str, Any]) -> ServerBlock:
    block = top.block(name)
    if block is None:
        return ServerBlock(engine=dict(inherited))
    urls = _urls(block)
    default = len(urls) if urls else 1
    num_instances = block.integer("num_instances", default, low=0)
    if urls and num_instances != len(urls):
        block.problem(
            "urls", f"Number of hostnames ({len(urls)}) should be equal to the number of instances ({num_instances})"
        )
    engine = {key: value for key, value in block.values.items() if key not in ("num_instances", "urls", "router")}
    for key, value in inherited.items():
        if key in engine and engine[key] != value:
            block.problem(
                key,
                f"specified both in the top-level and in the {name} section, but with different values "
                f"({value!r} and {engine[key]!r})",
            )
        engine.setdefault(key, value)
    router = _router(block, engine, top.values.get("conditional_disagg_config") is not None)
    return ServerBlock(num_instances, urls, router, engine, present=True)


def _urls(block: Reader) -> tuple[tuple[str, int], ...]:
    addresses = block.addresses("urls")
    seen: set[tuple[str, int]] = set()
    for address in addresses:
        if address in seen:
            block.problem("urls", f"{join_address(*address)} is listed twice")
        seen.add(address)
    return tuple(addresses)


def _router(block: Reader, engine: Mapping[str, Any], conditional: bool) -> RouterConfig:
    """Without a `router` map the type follows from what the workers do: they prefill, and may tell of their caches."""
    router = block.block("router") or Reader(f"{block.path}.router", {}, block)
    for key in router.values:
        if key not in ROUTER_KEYS:
            router.warn(key, "has no effect in this build")
    if "type" in router.values and isinstance(router.values["type"], str):
        router.values["type"] = router.values["type"].lower()
    kv_cache = engine.get("kv_cache_config")
    kv_cache = kv_cache if isinstance(kv_cache, dict) else {}
    block_size = kv_cache.get("tokens_per_block")
    model, batch = engine.get("model"), engine.get("max_batch_size")
    implied = "router" not in block.values
    default = RouterConfig.type
    if implied and block.path == "generation_servers" and conditional:
        default = "kv_cache_aware"
    elif implied and block.path == "context_servers" and isinstance(model, str):
        default = "least_time" if kv_cache.get("enable_block_reuse", True) is True else default
    return RouterConfig(
        type=router.choice("type", default, ROUTER_TYPES, (), "router type"),
        use_tokens=router.boolean("use_tokens", RouterConfig.use_tokens),
        max_batch_size=router.integer("max_batch_size", batch if type(batch) is int else 64, low=1),
        tokens_per_block=router.integer_or_none("tokens_per_block", block_size if type(block_size) is int else None),
        load_weight=router.number("load_weight", RouterConfig.load_weight),
        load_cap=router.number("load_cap", RouterConfig.load_cap),
        track_routed_blocks=router.boolean("track_routed_blocks", RouterConfig.track_routed_blocks),
        tokenizer_dir=router.text_or_none("tokenizer_dir", None),
        model_path=router.text_or_none("model_path", model if isinstance(model, str) else None),
        work_weight=router.number("work_weight", RouterConfig.work_weight),
        recent_weight=router.number("recent_weight", RouterConfig.recent_weight),
        match_threshold=router.number("match_threshold", RouterConfig.match_threshold),
        use_token_ids=router.boolean("use_token_ids", RouterConfig.use_token_ids),
        hash_skip_count=router.integer("hash_skip_count", RouterConfig.hash_skip_count, low=0),
        max_sessions=router.integer("max_sessions", RouterConfig.max_sessions, low=1),
        pool=isinstance(engine.get("kv_connector_config"), dict),
    )


def _cluster(top: Reader) -> ClusterConfig | None:
    block = top.block("disagg_cluster")
    if block is None:
        return None
    if "inactive_interval_sec" in block.values:
        block.warn("inactive_interval_sec", "read as inactive_timeout_sec")
        value = block.values.pop("inactive_interval_sec")
        if block.values.setdefault("inactive_timeout_sec", value) != value:
            block.problem("inactive_interval_sec", "differs from inactive_timeout_sec, for which it is an alias")
    block.close(
        "DisaggClusterConfig",
        ("cluster_uri", "cluster_name", "minimal_instances", "heartbeat_interval_sec", "inactive_timeout_sec"),
    )
    minimal = block.block("minimal_instances") or Reader(f"{block.path}.minimal_instances", {}, block)
    minimal.close("MinimalInstances", ("context_servers", "generation_servers"))
    uri = block.text("cluster_uri", "")
    if "cluster_uri" not in block.values:
        block.problem("cluster_uri", "missing")
    elif uri:
        try:
            parse_cluster_uri(uri)
        except SettingsError as error:
            block.problems.extend(error.problems)
    config = ClusterConfig(
        cluster_uri=uri,
        cluster_name=block.text("cluster_name", ClusterConfig.cluster_name),
        minimal_context=minimal.integer("context_servers", ClusterConfig.minimal_context, low=0),
        minimal_generation=minimal.integer("generation_servers", ClusterConfig.minimal_generation, low=0),
        heartbeat_interval_sec=block.integer("heartbeat_interval_sec", ClusterConfig.heartbeat_interval_sec, low=1),
        inactive_timeout_sec=block.integer("inactive_timeout_sec", ClusterConfig.inactive_timeout_sec, low=1),
    )
    if config.inactive_timeout_sec <= config.heartbeat_interval_sec:
        block.problem(
            "inactive_timeout_sec",
            f"{config.inactive_timeout_sec} must be above heartbeat_interval_sec ({config.heartbeat_interval_sec}): "
            "workers would be taken for dead between two heartbeats",
        )
    return config
