"""What an engine process is started with: one frozen value, made by the settings layer, sent as JSON."""

from __future__ import annotations

import msgspec

from engine.mock_profile import MockProfile


class PoolConfig(msgspec.Struct, frozen=True):
    """The `mooncake_store` block of `kv_connector_config`, resolved (trtllm-serve names)."""

    pool: str  # file://<manifest> or host:port
    model_key: str = ""  # "" = the fingerprint's digest
    role: str = "both"  # both | producer | consumer | capacity
    segment_size: int = 256 * 1024 * 1024  # bytes of host memory lent to the pool by this rank
    namespace: str | None = None  # None: the manifest's
    transfer_batch_size: int = 64  # keys a store call
    local_hostname: str | None = None
    run_dir: str | None = None
    master_timeout: float = 60.0  # seconds to wait for manifest and master at start-up
    get_timeout: float = 2.0  # seconds after which a read is given up and recomputed


class EngineConfig(msgspec.Struct, frozen=True):
    model: str  # directory with config.json + safetensors, or a .gguf file
    role: str = "aggregated"  # context | generation | aggregated
    device: str = "auto"  # auto = cuda where there is a GPU, else cpu
    dtype: str = "auto"  # auto = float32 on CPU; on a GPU the checkpoint's, or bfloat16
    kv_cache_dtype: str = "auto"  # auto = dtype; fp8 = e4m3 (GPU)
    weight_dtype: str = "auto"  # auto = dtype; int8 = weights rounded to 8 bits (CPU)
    tp_size: int = 1  # ranks that share one model
    tokens_per_block: int = 32
    num_blocks: int | None = None  # None: from max_tokens or the memory fraction
    max_tokens: int | None = None  # kv_cache_config.max_tokens
    free_gpu_memory_fraction: float = 0.9
    host_kv_bytes: int = 512 * 1024 * 1024  # CPU: size of the KV pool when nothing else fixes it
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True  # of a block's beginning, by a copy; never where there is a pool
    host_cache_size: int = 0  # bytes of host memory for evicted KV blocks
    capacity_policy: str = "GUARANTEED_NO_EVICT"  # or MAX_UTILIZATION (engine.scheduler)
    waiting_policy: str = "fcfs"  # or priority
    chunking_policy: str | None = None  # FIRST_COME_FIRST_SERVED | EQUAL_PROGRESS; None: engine.budget
    prefix_aware: bool = True  # a prompt waits for another one that is computing most of it (engine.scheduler)
    event_buffer_max_size: int = 0  # events in TensorRT-LLM's format that are kept for POST /kv_cache_events
    enable_iter_perf_stats: bool = False  # statistics of single steps, for GET /metrics
    iter_perf_stats_interval: int = 1  # steps
    return_perf_metrics: bool = False  # times and blocks of single requests, for GET /perf_metrics
    max_batch_size: int = 64
    max_num_tokens: int = 512  # tokens a step: prefill chunk + decodes
    max_seq_len: int | None = None  # None: the model's
    cpu_threads: int = 0  # torch threads; 0 = all cores
    handoff_timeout: float = 60.0  # seconds that pages stay pinned unfetched (kv_transfer_timeout_ms)
    fetch_timeout: float = 10.0  # seconds for one whole fetch, then recompute
    on_handoff_failure: str = "recompute"  # or "fail"
    transfers: tuple[str, ...] = ("shm", "pool")  # hand-off paths, in order of preference: shm, nixl, mooncake, pool
    transfers_required: bool = False  # a path that cannot be had is an error, not a note
    transfer_poll_interval: float = 0.0003  # seconds between two looks for readers, while a hand-off is open (NIXL)
    max_tokens_in_buffer: int | None = None  # tokens of one read; None: as many as fit a slice
    pool: PoolConfig | None = None
    endpoint: str = ""  # host:port of this worker's HTTP server, put into handles
    guided_decoding_backend: str = "xgrammar"  # or "llguidance"; "none": guided requests are refused
    tokenizer: str | None = (
        None  # directory, tokenizer.json or .gguf whose tokens guided decoding is about; None: model
    )
    custom_module_dirs: tuple[str, ...] = ()
    fault_injection: bool = False
    backend: str = "pytorch"  # or mock: no model, scripted tokens (engine.mock)
    mock: MockProfile | None = None
    log_level: str = "info"
