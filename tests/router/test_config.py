"""The disagg YAML: shapes that must load, and problems that must be told."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.errors import SettingsError
from router import config as config_module
from router.config import DisaggConfig, load_config, parse_config, require_workers
from router.config_schema import render, schema

CTX = {"num_instances": 1, "urls": ["localhost:8001"]}
GEN = {"num_instances": 1, "urls": ["localhost:8002"]}
BOTH = {"context_servers": CTX, "generation_servers": GEN}


def problems_of(document: dict[str, Any], **overrides: Any) -> dict[str, str]:
    with pytest.raises(SettingsError) as caught:
        parse_config(document, overrides)
    return dict(caught.value.problems)


def test_the_representative_file() -> None:
    config = parse_config(
        yaml.safe_load(
            """
hostname: 0.0.0.0
port: 8000
backend: pytorch
context_servers:
  num_instances: 2
  router: {type: kv_cache_aware}
  urls: ["10.0.0.1:8001", "10.0.0.1:8002"]
generation_servers:
  num_instances: 1
  urls: ["10.0.0.2:8003"]
"""
        )
    )
    assert config.context.urls == (("10.0.0.1", 8001), ("10.0.0.1", 8002))
    assert config.context.router.type == "kv_cache_aware" and config.generation.router.type == "round_robin"
    assert config.context.engine == config.generation.engine == {"backend": "pytorch"}
    assert not config.warnings
    require_workers(config)


LEGACY = {
    "backend": "pytorch",
    "model": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "free_gpu_memory_fraction": 0.25,
    "use_cuda_graph": False,
    "kv_cache_dtype": "fp8",
    "disable_overlap_scheduler": True,
    "enable_autotuner": False,
    "gather_generation_logits": True,
    "cuda_graph_config": "None",
}
SIDE = {
    "return_perf_metrics": True,
    "perf_metrics_max_requests": 10,
    "kv_cache_config": {
        "enable_block_reuse": True,
        "enable_partial_reuse": False,
        "event_buffer_max_size": 1024,
        "free_gpu_memory_fraction": 0.15,
        "use_kv_cache_manager_v2": True,
    },
    "cache_transceiver_config": {"backend": "NIXL", "max_tokens_in_buffer": 4096, "transceiver_runtime": "PYTHON"},
}


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"hostname": "localhost", "port": 8333, "backend": "pytorch", **BOTH},
        {**LEGACY, **BOTH},
        {"context_servers": {**CTX, **SIDE}, "generation_servers": {**GEN, **SIDE}},
        {
            "context_servers": {"num_instances": 1, "tensor_parallel_size": 2},
            "generation_servers": {"num_instances": 2},
        },
        {"context_servers": {**CTX, "router": {"type": "kv_cache_aware", "track_routed_blocks": True}}},
        {"context_servers": {**CTX, "router": {"type": "load_balancing", "use_tokens": True}}},
        {"context_servers": {**CTX, "router": {"type": "Round_Robin"}}},
        {"context_servers": {**CTX, "router": {}}, "generation_servers": {**GEN, "router": None}},
        {"context_servers": None, "generation_servers": None, "conditional_disagg_config": None},
        {"context_servers": {"num_instances": 0}, "generation_servers": GEN},
        {"conditional_disagg_config": {"max_local_prefill_length": 100}, **BOTH},
        {"return_perf_metrics": True, "perf_metrics_max_requests": 100, "otlp_config": {"otlp_traces_endpoint": "x"}},
        {
            "hostname": "localhost",
            "port": 8000,
            "backend": "pytorch",
            "disagg_cluster": {"cluster_uri": "http://localhost:8000", "cluster_name": "example_cluster"},
        },
        {"disagg_cluster": {"cluster_uri": "redis://embedded"}, **BOTH},
        {"env_overrides": {"A": "b"}, "telemetry_config": {"disabled": True}, "num_workers": 1},
    ],
)
def test_shapes_that_must_load(document: dict[str, Any]) -> None:
    assert isinstance(parse_config(document), DisaggConfig)


def test_engine_keys_are_inherited_by_both_blocks() -> None:
    config = parse_config(
        {
            "kv_cache_config": {"a": 1},
            "cuda_graph_config": "None",
            "context_servers": {**CTX, "max_seq_len": 7},
            "generation_servers": GEN,
        }
    )
    assert config.context.engine == {"kv_cache_config": {"a": 1}, "cuda_graph_config": "None", "max_seq_len": 7}
    assert config.generation.engine == {"kv_cache_config": {"a": 1}, "cuda_graph_config": "None"}


def test_an_equal_value_in_a_block_is_fine_and_another_is_a_conflict() -> None:
    same = {"max_seq_len": 7, "context_servers": {**CTX, "max_seq_len": 7}, "generation_servers": GEN}
    assert parse_config(same).context.engine == {"max_seq_len": 7}
    problems = problems_of({"max_seq_len": 8, "context_servers": {**CTX, "max_seq_len": 7}, "generation_servers": GEN})
    assert list(problems) == ["context_servers.max_seq_len"]
    assert (
        "specified both in the top-level and in the context_servers section" in problems["context_servers.max_seq_len"]
    )


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("host:1", ("host", 1)),
        ("http://host:1", ("host", 1)),
        ("http://host:1/", ("host", 1)),
        ("[::1]:80", ("::1", 80)),
        ("http://[fe80::1]:80", ("fe80::1", 80)),
    ],
)
def test_urls_with_scheme_and_ipv6(url: str, address: tuple[str, int]) -> None:
    assert parse_config({"context_servers": {"urls": [url]}}).context.urls == (address,)


@pytest.mark.parametrize(
    "url", ["host", "host:", ":80", "host:0", "host:70000", "::1:80", "host:http", "https://h:1", "h:1/v1", "", 8001]
)
def test_bad_urls_are_named(url: object) -> None:
    assert "context_servers.urls[1]" in problems_of({"context_servers": {"urls": ["a:1", url], "num_instances": 1}})


def test_num_instances_must_fit_urls() -> None:
    problems = problems_of({"context_servers": {"num_instances": 2, "urls": ["a:1"]}})
    assert "Number of hostnames (1) should be equal to the number of instances (2)" in problems["context_servers.urls"]
    assert parse_config({"context_servers": {"urls": ["a:1", "b:1"]}}).context.num_instances == 2


def test_a_url_twice_in_a_block_is_refused() -> None:
    assert "twice" in problems_of({"context_servers": {"urls": ["a:1", "http://a:1"]}})["context_servers.urls"]


def test_router_arguments_come_from_the_map_then_from_the_engine_keys() -> None:
    block = {**CTX, "model": "m", "max_batch_size": 9, "kv_cache_config": {"tokens_per_block": 16}}
    router = parse_config({"context_servers": {**block, "router": {"type": "KV_CACHE_AWARE"}}}).context.router
    assert (router.type, router.model_path, router.max_batch_size, router.tokens_per_block) == (
        "kv_cache_aware",
        "m",
        9,
        16,
    )
    own = {"type": "kv_cache_aware", "model_path": "n", "max_batch_size": 3, "tokens_per_block": 64, "load_cap": "inf"}
    router = parse_config({"context_servers": {**block, "router": own}}).context.router
    assert (router.model_path, router.max_batch_size, router.tokens_per_block) == ("n", 3, 64)
    assert math.isinf(router.load_cap)


@pytest.mark.parametrize(
    ("router", "message"),
    [
        ({"type": "magic"}, "Unsupported router type: magic"),
        ({"type": 7}, "Unsupported router type: 7"),
    ],
)
def test_router_types_that_are_not_supported_name_those_that_are(router: dict[str, Any], message: str) -> None:
    problem = problems_of({"generation_servers": {**GEN, "router": router}})["generation_servers.router.type"]
    assert message in problem and "round_robin, load_balancing, kv_cache_aware" in problem


def test_unknown_router_arguments_are_warned_of() -> None:
    config = parse_config({"context_servers": {**CTX, "router": {"surprise": 0.5}}})
    assert config.warnings == ("context_servers.router.surprise: has no effect in this build",)


def test_the_cluster_block() -> None:
    document = {
        "cluster_uri": "redis://h:1/2",
        "minimal_instances": {"context_servers": 2},
        "heartbeat_interval_sec": 1,
    }
    cluster = parse_config({"disagg_cluster": document}).cluster
    assert cluster is not None
    assert (cluster.cluster_uri, cluster.cluster_name) == ("redis://h:1/2", "")
    assert (cluster.minimal_context, cluster.minimal_generation) == (2, 1)
    assert (cluster.heartbeat_interval_sec, cluster.inactive_timeout_sec) == (1, 10)


def test_the_documented_but_wrong_key_is_an_alias() -> None:
    config = parse_config({"disagg_cluster": {"cluster_uri": "redis://h:1", "inactive_interval_sec": 33}})
    assert config.cluster is not None and config.cluster.inactive_timeout_sec == 33
    assert any("inactive_interval_sec" in warning for warning in config.warnings)
    both = {"cluster_uri": "redis://h:1", "inactive_interval_sec": 33, "inactive_timeout_sec": 34}
    assert "disagg_cluster.inactive_interval_sec" in problems_of({"disagg_cluster": both})


@pytest.mark.parametrize(
    ("block", "path"),
    [
        ({"cluster_uri": "redis://h:1", "clustername": "x"}, "disagg_cluster.clustername"),
        ({"cluster_uri": "redis://h:1", "minimal_instances": {"ctx": 1}}, "disagg_cluster.minimal_instances.ctx"),
        ({"cluster_uri": "etcd://h:1"}, "disagg_cluster.cluster_uri"),
        ({"cluster_uri": "gopher://h:1"}, "disagg_cluster.cluster_uri"),
        ({"cluster_uri": 7}, "disagg_cluster.cluster_uri"),
        ({}, "disagg_cluster.cluster_uri"),
        ({"cluster_uri": "redis://h:1", "heartbeat_interval_sec": "5"}, "disagg_cluster.heartbeat_interval_sec"),
        ({"cluster_uri": "redis://h:1", "heartbeat_interval_sec": 0}, "disagg_cluster.heartbeat_interval_sec"),
        ({"cluster_uri": "redis://h:1", "inactive_timeout_sec": 3}, "disagg_cluster.inactive_timeout_sec"),  # C128
        ("redis://h:1", "disagg_cluster"),
    ],
)
def test_closed_blocks_name_what_is_wrong(block: Any, path: str) -> None:
    assert path in problems_of({"disagg_cluster": block})


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"port": "8000"}, "port"),
        ({"port": 70000}, "port"),
        ({"port": True}, "port"),
        ({"hostname": 7}, "hostname"),
        ({"node_id": 256}, "node_id"),
        ({"node_id": -1}, "node_id"),
        ({"max_retries": -1}, "max_retries"),
        ({"schedule_style": "sideways"}, "schedule_style"),
        ({"allow_request_chat_template": "yes"}, "allow_request_chat_template"),
        ({"num_workers": 2}, "num_workers"),
        ({"disagg_coordinator_url": "http://x:1"}, "disagg_coordinator_url"),
        ({"internal_request_auth_key": ""}, "internal_request_auth_key"),
        ({"internal_request_auth_key": 7}, "internal_request_auth_key"),
        ({"cors_allow_origins": "*"}, "cors_allow_origins"),
        ({"api_keys_file": 7}, "api_keys_file"),
        ({"admission": {"saturation": 0}}, "admission.saturation"),
        ({"admission": {"max_queue": 0}}, "admission.max_queue"),
        (
            {"conditional_disagg_config": {"max_local_prefill": 0}, **BOTH},
            "conditional_disagg_config.max_local_prefill",
        ),
        (
            {
                "conditional_disagg_config": {},
                "generation_servers": {**GEN, "router": {"type": "round_robin"}},
            },
            "conditional_disagg_config",
        ),
        ({"context_servers": []}, "context_servers"),
        ({"context_servers": {"urls": "a:1"}}, "context_servers.urls"),
        ({"context_servers": {"router": {"load_weight": -1}}}, "context_servers.router.load_weight"),
        ({"context_servers": {"router": {"tokens_per_block": 0}}}, "context_servers.router.tokens_per_block"),
        ({"context_servers": {"router": "round_robin"}}, "context_servers.router"),
    ],
)
def test_problems_carry_their_path(document: dict[str, Any], path: str) -> None:
    assert list(problems_of(document)) == [path]


def test_all_problems_are_told_at_once() -> None:
    document = {
        "port": "x",
        "num_workers": 4,
        "context_servers": {"urls": ["bad", "a:1"], "num_instances": 5, "router": {"type": "magic"}},
        "disagg_cluster": {"cluster_uri": "ftp://x", "surprise": 1},
    }
    assert problems_of(document).keys() == {
        "port",
        "num_workers",
        "context_servers.urls[0]",
        "context_servers.urls",
        "context_servers.router.type",
        "disagg_cluster.cluster_uri",
        "disagg_cluster.surprise",
    }


def test_what_is_not_built_is_never_silent() -> None:
    document = {
        "otlp_config": {"otlp_traces_endpoint": "x"},
        "return_perf_metrics": True,
        "perf_metrics_max_requests": 5,
        "perf_metrics_output_dir": "/tmp",
        "gen_strip_message_history": True,
        "gen_tokids_ctxbytes": True,
        "conversation_affinity_header_for_subagents": "x",
        "subagent_affinity_scope": "both",
    }
    warned = {warning.partition(":")[0] for warning in parse_config(document).warnings}
    assert warned == document.keys()
    assert not parse_config(dict.fromkeys(document)).warnings


def test_the_command_line_wins() -> None:
    for file, line in (("context_first", "generation_first"), ("generation_first", "context_first")):
        assert parse_config({"schedule_style": file}, {"schedule_style": line}).schedule_style == line


def test_context_workers_that_may_have_events_are_chosen_by_time_unless_said_otherwise() -> None:
    named = {"model": "m", "context_servers": CTX, "generation_servers": GEN}
    config = parse_config(named)
    assert (config.context.router.type, config.generation.router.type) == ("least_time", "round_robin")
    assert parse_config({**named, "context_servers": {**CTX, "router": {}}}).context.router.type == "round_robin"
    assert parse_config(BOTH).context.router.type == "round_robin"  # no tokenizer to read prompts with
    without_reuse = {**named, "kv_cache_config": {"enable_block_reuse": False}}
    assert parse_config(without_reuse).context.router.type == "round_robin"


def test_conditional_prefill_needs_to_know_the_generation_workers_caches() -> None:
    config = parse_config({"conditional_disagg_config": {"max_local_prefill_length": 100}, **BOTH})
    assert config.max_local_prefill_length == 100 and config.generation.router.type == "kv_cache_aware"


def test_a_router_without_workers_is_refused() -> None:
    with pytest.raises(SettingsError) as caught:
        require_workers(parse_config({"context_servers": {"num_instances": 1}}))
    assert [path for path, _ in caught.value.problems] == ["context_servers.urls", "generation_servers.urls"]
    require_workers(parse_config({"disagg_cluster": {"cluster_uri": "redis://h:1"}}))


@pytest.mark.parametrize(("text", "message"), [("a: [", "not YAML"), ("- 1", "not a mapping"), ("\x00", "not YAML")])
def test_files_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "disagg.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load_config(str(file))
    with pytest.raises(SettingsError, match="No such file"):
        load_config(str(tmp_path / "absent.yaml"))


def test_the_shipped_file_loads_and_names_every_key() -> None:
    shipped = Path(__file__).parents[2] / "configs" / "disagg.yaml"
    config = load_config(str(shipped))
    assert not config.warnings
    require_workers(config)
    text = shipped.read_text()
    fields = [*config_module.ROUTER_KEYS, *(field.name for field in dataclasses.fields(config_module.AdmissionConfig))]
    missing = [key for key in [*config_module._KNOWN, *fields] if key not in text]
    assert sorted(missing) == ["env_overrides", "telemetry_config"]


class TestSchema:
    def test_the_published_one_is_not_stale(self) -> None:
        published = Path(__file__).parents[2] / "configs" / "disagg.schema.json"
        assert published.read_bytes() == render(), "python -m router.config_schema > configs/disagg.schema.json"

    def test_it_knows_every_key_and_its_default(self) -> None:
        described = schema()
        keys = described["properties"].keys() | config_module._NOT_BUILT_HARMLESS.keys()
        assert set(config_module._KNOWN) - keys == {"env_overrides", "telemetry_config", "disagg_coordinator_url"}
        servers = described["$defs"]["servers"]["properties"]
        assert set(servers["router"]["properties"]) == set(config_module.ROUTER_KEYS)
        assert servers["router"]["properties"]["load_weight"] == {"type": "number", "default": 0.25}
        assert described["properties"]["admission"]["properties"]["max_queue_size"]["default"] == 1024

    def test_the_shipped_file_has_only_what_it_allows(self) -> None:
        shipped = yaml.safe_load((Path(__file__).parents[2] / "configs" / "disagg.yaml").read_text())
        described = schema()["properties"]
        assert shipped.keys() <= described.keys()
        assert shipped["admission"].keys() <= described["admission"]["properties"].keys()
