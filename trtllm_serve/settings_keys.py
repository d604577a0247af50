"""The YAML keys of a worker: which have an effect and how they are read; which are known and change nothing here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from engine.mock_profile import MockProfile
from openai_api.reasoning import FORMS

Parser = Callable[[Any], Any]
"""Value to its typed form; ValueError says what is allowed."""


def positive(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError("must be a whole number above 0")
    return value


def not_negative(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("must be a whole number, 0 or above")
    return value


def seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError("must be a number of seconds above 0")
    return float(value)


def milliseconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError("must be a number of milliseconds above 0")
    return float(value) / 1000


def fraction(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise ValueError("must be a number above 0, at most 1")
    return float(value)


def boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be text")
    return value


def any_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be text")
    return value


def texts(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError("must be a list of texts")
    return tuple(items)


def one_of(*allowed: str) -> Parser:
    def parse(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return str(value)

    return parse


def only(supported: Any, reason: str) -> Parser:
    """A key of TensorRT-LLM's of which this build has one value."""

    def parse(value: Any) -> Any:
        if value != supported:
            raise ValueError(f"only {supported!r} is supported by this build: {reason}")
        return value

    return parse


ANSWERS: dict[str, Parser] = {"reasoning_parser": one_of(*FORMS)}
"""Of the server rather than of its engine."""

_UNITS = {"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


def size(value: Any) -> int:
    """Bytes from a whole number or text as "512MiB"."""
    if type(value) is int and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|TiB)\s*", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("must be bytes as a whole number, or a number with KiB, MiB, GiB or TiB (GB is ambiguous)")
    return int(float(match[1]) * (1 << _UNITS[match[2]]))


def mock_profile(value: Any) -> MockProfile:
    try:
        return msgspec.convert(value, MockProfile)
    except msgspec.ValidationError as error:
        raise ValueError(f"is no mock profile: {error}") from None


ENGINE: dict[str, tuple[str, Parser]] = {
    "backend": ("backend", one_of("pytorch", "mock")),
    "mock_config": ("mock", mock_profile),
    "dtype": ("dtype", one_of("auto", "float32", "bfloat16", "float16")),
    "weight_dtype": ("weight_dtype", one_of("auto", "int8")),
    "tensor_parallel_size": ("tp_size", positive),
    "max_batch_size": ("max_batch_size", positive),
    "max_num_tokens": ("max_num_tokens", positive),
    "max_seq_len": ("max_seq_len", positive),
    "cpu_threads": ("cpu_threads", not_negative),
    "custom_module_dirs": ("custom_module_dirs", texts),
    "guided_decoding_backend": ("guided_decoding_backend", one_of("xgrammar", "llguidance", "none")),
    "on_handoff_failure": ("on_handoff_failure", one_of("recompute", "fail")),
    "fetch_timeout": ("fetch_timeout", seconds),
    "fault_injection": ("fault_injection", boolean),
    "kv_cache_config.tokens_per_block": ("tokens_per_block", positive),
    "kv_cache_config.dtype": ("kv_cache_dtype", one_of("auto", "fp8")),
    "kv_cache_config.max_tokens": ("max_tokens", positive),
    "kv_cache_config.free_gpu_memory_fraction": ("free_gpu_memory_fraction", fraction),
    "kv_cache_config.enable_block_reuse": ("enable_block_reuse", boolean),
    "kv_cache_config.max_gpu_total_bytes": ("host_kv_bytes", size),
    "kv_cache_config.enable_partial_reuse": ("enable_partial_reuse", boolean),
    "kv_cache_config.host_cache_size": ("host_cache_size", size),
    "kv_cache_config.event_buffer_max_size": ("event_buffer_max_size", not_negative),
    "scheduler_config.capacity_scheduler_policy": ("capacity_policy", one_of("GUARANTEED_NO_EVICT", "MAX_UTILIZATION")),
    "scheduler_config.waiting_queue_policy": ("waiting_policy", one_of("fcfs", "priority")),
    "scheduler_config.enable_prefix_aware_scheduling": ("prefix_aware", boolean),
    "scheduler_config.context_chunking_policy": (
        "chunking_policy",
        one_of("FCFS", "FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"),
    ),
    "enable_iter_perf_stats": ("enable_iter_perf_stats", boolean),
    "iter_perf_stats_interval": ("iter_perf_stats_interval", positive),
    "return_perf_metrics": ("return_perf_metrics", boolean),
    "cache_transceiver_config.kv_transfer_timeout_ms": ("handoff_timeout", milliseconds),
    "cache_transceiver_config.kv_transfer_poll_interval_ms": ("transfer_poll_interval", milliseconds),
    "cache_transceiver_config.max_tokens_in_buffer": ("max_tokens_in_buffer", positive),
}
"""Key to (field of EngineConfig, parser). Keys that are not TensorRT-LLM's: cpu_threads, weight_dtype,
on_handoff_failure, fetch_timeout, fault_injection, mock_config."""

STORE: dict[str, Parser] = {
    "pool": text,
    "model_key": any_text,
    "role": one_of("both", "producer", "consumer", "capacity"),
    "segment_size": size,
    "namespace": text,
    "transfer_batch_size": positive,
    "local_hostname": text,
    "run_dir": text,
    "master_timeout": seconds,
    "get_timeout": seconds,
}
"""Keys of kv_connector_config.mooncake_store, which are the fields of PoolConfig."""

CLUSTER: dict[str, Parser] = {
    "cluster_uri": text,
    "cluster_name": any_text,
    "heartbeat_interval_sec": seconds,
    "inactive_timeout_sec": seconds,
}

CHECKED: dict[str, Parser] = {
    "pipeline_parallel_size": only(1, "models are divided by tensor_parallel_size alone"),
    "context_parallel_size": only(1, "models are divided by tensor_parallel_size alone"),
    "moe_expert_parallel_size": only(1, "models are divided by tensor_parallel_size alone"),
    "max_beam_width": only(1, "there is no beam search"),
    "kv_connector_config.connector": one_of("mooncake-store"),
    "speculative_config": only(None, "there is no speculative decoding"),
    "lora_config": only(None, "there are no adapters"),
}
"""Values that would change answers or need what is not there: refused, not ignored."""

BLOCKS: dict[str, frozenset[str]] = {
    "kv_cache_config": frozenset({
        "copy_on_partial_reuse", "disk_cache_size",
        "disk_cache_path", "attention_dp_events_gather_period_ms",
        "kv_cache_event_hash_algo", "kv_events_config", "use_kv_cache_manager_v2", "block_reuse_config",
        "max_attention_window", "max_util_for_resume", "secondary_offload_min_priority", "pool_ratio",
        "iteration_stats_interval", "sink_token_length", "cross_kv_cache_fraction", "use_uvm",
        "mamba_ssm_cache_dtype",
    }),
    "scheduler_config": frozenset({
        "dynamic_batch_config", "use_python_scheduler",
    }),
    "cache_transceiver_config": frozenset({
        "backend", "kv_transfer_sender_future_timeout_ms",
        "kv_cache_bounce_size_mb", "agent_bounce_buffer_enable", "agent_bounce_params", "enable_pipelined_transfer",
        "transceiver_runtime",
    }),
    "kv_connector_config": frozenset({"connector", "mooncake_store"}),
    "kv_connector_config.mooncake_store": frozenset({"stage_through_host"}),
    "disagg_cluster": frozenset({"minimal_instances", "inactive_interval_sec"}),
}  # fmt: skip
"""Closed blocks, with their further keys: an unknown key there is an error."""

EFFECTIVE_IN_BLOCKS = frozenset({
    "cache_transceiver_config.backend", "kv_connector_config.connector",
    "kv_connector_config.mooncake_store", "disagg_cluster.minimal_instances", "disagg_cluster.inactive_interval_sec",
})  # fmt: skip

OPEN = frozenset({
    "allow_request_chat_template", "attention_dp_config", "attn_backend", "batch_wait_timeout_iters",
    "batch_wait_timeout_ms", "batched_logits_processor", "build_config", "checkpoint_format", "checkpoint_loader",
    "cp_config", "cuda_graph_config", "decoding_config", "disable_overlap_scheduler", "embedding_parallel_mode",
    "enable_attention_dp", "enable_autotuner", "enable_chunked_prefill",
    "enable_iter_req_stats", "enable_layerwise_nvtx_marker", "enable_lora", "enable_min_latency", "env_overrides",
    "extended_runtime_perf_knob_config", "fast_build", "gather_generation_logits", "gpus_per_node",
    "internal_request_auth_key", "iter_stats_max_iterations",
    "kv_cache_dtype", "load_format", "max_input_len", "max_stats_len", "mm_encoder_only", "model", "moe_config",
    "moe_backend", "moe_cluster_parallel_size", "moe_tensor_parallel_size", "multimodal_config",
    "num_postprocess_workers", "nvfp4_gemm_config", "orchestrator_type", "otlp_traces_endpoint",
    "peft_cache_config", "perf_metrics_max_requests", "postprocess_tokenizer_dir", "print_iter_log",
    "processor_kwargs", "pytorch_backend_config", "quant_config", "ray_placement_config",
    "request_stats_max_iterations", "revision", "sampler_type",
    "skip_tokenizer_init", "sparse_attention_config", "stream_interval", "telemetry_config", "tokenizer",
    "tokenizer_mode", "tokenizer_revision", "torch_compile_config", "trust_remote_code", "use_cuda_graph",
    "video_pruning_rate", "workspace",
})  # fmt: skip
"""Top-level keys of TensorRT-LLM's LlmArgs that change nothing here."""

ALIASES = {
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "cp_size": "context_parallel_size",
    "ep_size": "moe_expert_parallel_size",
}
"""Other names of top-level keys, from legacy files and from flags."""

NOT_BY_SET = {
    "model": "use MODEL",
    "backend": "use --backend",
    "telemetry_config": "use --telemetry or --no-telemetry",
    "env_overrides": "use the YAML file",
    "internal_request_auth_key": "use the YAML file",
    "allow_request_chat_template": "use --allow_request_chat_template",
    "disagg_cluster": "use --disagg_cluster_uri or the YAML file",
    "batched_logits_processor": "it is no YAML value",
    "checkpoint_loader": "it is no YAML value",
}
