"""Everything that crosses a process border over HTTP or the registry, as plain data.

Named by who receives it. Unknown fields are ignored on input, unset ones are never sent: workers of other makes
refuse fields that they do not know. Upstream's names and numbers are TensorRT-LLM 1.4's.
"""

from __future__ import annotations

import enum
import ipaddress
from typing import Any

import msgspec


class RequestType(enum.StrEnum):
    CONTEXT_ONLY = "context_only"
    GENERATION_ONLY = "generation_only"
    CONTEXT_AND_GENERATION = "context_and_generation"


class ScheduleStyle(enum.IntEnum):
    """Travels as a number."""

    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1


class ServerRole(enum.IntEnum):
    """Travels as a number in registry records. AGGREGATED is ours and is never registered."""

    CONTEXT = 0
    GENERATION = 1
    MM_ENCODER = 2
    VISUAL_GEN = 3
    EMBEDDING = 4
    AGGREGATED = 100


# ---------------------------------------------------------------- router <-> worker: bodies of the two legs


class DisaggregatedParams(msgspec.Struct, omit_defaults=True):
    """`disaggregated_params`: on requests at top level, on answers one per choice."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    ctx_request_id: int | None = None
    disagg_request_id: int | None = None
    encoded_opaque_state: str | None = None
    draft_tokens: list[int] | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None
    ctx_usage: dict[str, Any] | None = None
    conversation_id: str | None = None
    return_prompt_token_ids_b64: bool | None = None


MIN_DISAGG_REQUEST_ID = 1 << 40
"""Smaller ids belong to a worker's own local requests."""


# ---------------------------------------------------------------- worker -> router: what a worker is

SERVER_INFO_PATH = "/server_info"
KV_EVENTS_PATH = "/kv_events/stream"
FOLLOW_PATH = "/handoff/follow"
"""POST {"disagg_request_id": id}: generation_first; a stream of what a context worker has of this hand-off."""
RELEASE_PATH = "/handoff/release"
"""POST {"disagg_request_id": id}: drop the pages that a context worker holds for this hand-off. Idempotent."""


class Fingerprint(msgspec.Struct, frozen=True):
    """Everything that changes KV bytes or tokenisation. Two workers hand off only if all fields are equal."""

    model: str  # digest of configuration and weights, not a path
    tokenizer: str  # digest of tokenizer and chat template
    kv_dtype: str  # "float32", "bfloat16"
    layout: str  # "block_nhd": [block][layer][K,V][token][head][dim]
    block_size: int  # tokens
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tp_size: int

    def digest(self) -> str:
        """32 hex digits; part of every pool key and of every hand-off handle."""
        from hashlib import blake2b

        return blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()

    def differences(self, other: Fingerprint) -> list[str]:
        """Human lines "field: ours X, theirs Y", empty when the two can exchange KV."""
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return [f"{name}: {mine[name]} here, {theirs[name]} there" for name in mine if mine[name] != theirs[name]]


class ServerInfo(msgspec.Struct, omit_defaults=True):
    """GET /server_info. The first four fields are upstream's; workers of other makes lack the rest."""

    disaggregated_params: dict[str, Any] = msgspec.field(default_factory=dict)
    max_batch_size: int | None = None
    kv_cache_hash_algo: str | None = None
    tokens_per_block: int | None = None
    engine: str | None = None  # "trtllm-disagg" for our workers
    version: str | None = None
    role: str | None = None  # "context", "generation", "aggregated"
    model: str | None = None  # served model name
    accepts: list[str] | None = None  # names that requests may use for it
    incarnation: str | None = None
    fingerprint: Fingerprint | None = None
    max_seq_len: int | None = None
    transfers: list[str] | None = None  # hand-off paths this worker offers or can fetch by, fastest first
    transfer_choice: str | None = None  # the same as a sentence, with the reasons


class WorkerRecord(msgspec.Struct, frozen=True):
    """Value of a registry entry, byte-compatible with upstream: exactly these four fields."""

    worker_id: str
    host: str
    port: int
    role: int

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)


def worker_key_prefix(cluster_name: str) -> str:
    return f"/trtllm-disagg/{cluster_name}/workers/"


class KvEvent(msgspec.Struct, omit_defaults=True):
    """One change of a worker's prefix cache, in the worker's order. Keys are stored at level 0, the KV pool, and are
    removed when no tier has them."""

    stored: list[bytes] = []  # block keys, in chain order
    removed: list[bytes] = []
    cleared: bool = False  # everything is gone
    moved: list[bytes] = []  # keys that are at `level` now: 0 = KV pool, 1 = host memory
    level: int = 0


class KvEventBatch(msgspec.Struct, omit_defaults=True):
    """One line of GET /kv_events/stream (JSON lines; keys as base64 text).

    A stream opens with a snapshot batch (cleared = true, stored = all resident keys) and goes on with changes; `seq`
    rises by one a batch. A reader that sees another incarnation or a gap reconnects.
    """

    incarnation: str
    seq: int
    events: list[KvEvent] = []


# ---------------------------------------------------------------- addresses


def join_address(host: str, port: int) -> str:
    """host:port, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_address(text: str) -> tuple[str, int]:
    """("::1", 80) from "[::1]:80", "http://[::1]:80/" and the like. ValueError names what is wrong."""
    bare = text.strip().removeprefix("http://").rstrip("/")
    host, colon, port = bare.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not host:port")
    if any(character.isspace() or character in "/@?#" for character in host):
        raise ValueError(f"{text!r} is not host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise ValueError(f"{text!r} is not host:port: {error}") from None
    elif ":" in host:
        raise ValueError(f"{text!r}: an IPv6 address needs brackets, as in [{host}]:{port}")
    return host, int(port)
