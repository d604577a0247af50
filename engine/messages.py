"""All messages between the HTTP process of a worker and its engine process, by receiver.

Frames on a Unix socket pair: 4 bytes little-endian length, then msgpack. End of file is the death of the other side:
the engine process exits, the HTTP process fails every open request and turns unhealthy.
"""

from __future__ import annotations

import msgspec

from kvstore.handoff import Handle, StartState
from kvstore.protocol import Fingerprint, KvEvent


class GuidedDecoding(msgspec.Struct, frozen=True):
    """What the answer must match. `text` is the JSON text of a schema or of a structural tag, a regular expression, or
    a grammar in EBNF with the rule `root`."""

    kind: str  # "json_schema" | "regex" | "ebnf" | "structural_tag"
    text: str


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    max_tokens: int  # > 0, already cut to the model's length
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    seed: int = 0  # of choice 0; choice i uses seed + i (mod 2**63)
    n: int = 1
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0  # EOS and stop ids are not sampled before this many tokens
    logprobs: int | None = None  # None: off; k: the sampled token's and the k best
    min_p: float = 0.0  # 0 = off
    top_p_decay: float = 1.0  # top_p is multiplied by this after each token ...
    top_p_min: float = 0.0  # ... and never falls below this
    repetition_penalty: float = 1.0  # of tokens in prompt or answer; 1 = off
    presence_penalty: float = 0.0  # of tokens in the answer; 0 = off
    frequency_penalty: float = 0.0  # times their count in the answer; 0 = off
    logit_bias: dict[int, float] = {}  # token id to what is added to its logit
    bad_words: list[list[int]] = []  # token sequences that the answer must not contain
    prompt_logprobs: int | None = None  # as logprobs, of the prompt's tokens; the prefix cache is not read then
    processed_logprobs: bool = False  # of the logits after bias, penalties, bans and grammar, not of the raw ones
    guided: GuidedDecoding | None = None


# ---------------------------------------------------------------- to the engine


class RetentionRange(msgspec.Struct, frozen=True, omit_defaults=True):
    """Prompt positions `start` to `end` (None: the prompt's end) and how long their KV blocks are worth keeping."""

    start: int = 0
    end: int | None = None
    priority: int = 35  # 0 to 100, the higher the longer
    seconds: float | None = None  # after which the priority is 35 again; None: never


class Retention(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the prefix cache is to keep of one request: TensorRT-LLM's KvCacheRetentionConfig."""

    ranges: list[RetentionRange] = []
    decode_priority: int = 35  # of blocks of generated tokens
    decode_seconds: float | None = None


class Submit(msgspec.Struct, tag="submit", omit_defaults=True):
    """One request. With `handoff_id`: context-only, stop after the first token and offer the blocks under this id.
    With `handle`: generation-only, fetch the blocks, replay `handle.starts` as the first output, decode on."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    handoff_id: int | None = None
    handle: Handle | None = None
    cache_salt: str = ""
    priority: float = 0.5  # 0 to 1, higher goes first where waiting_queue_policy is priority
    retention: Retention | None = None
    waits_for_reader: bool = False  # context-only: begin when a generation worker follows it (generation_first)
    awaits: int | None = None  # generation-only without a handle: the hand-off that a context worker makes meanwhile
    source: str = ""  # host:port of that context worker


class Abort(msgspec.Struct, tag="abort"):
    request_id: str


class ReleaseHandoff(msgspec.Struct, tag="release"):
    """Drop the pages held for this hand-off, in whatever state it is. Unknown ids are ignored, and so is a release
    that names another incarnation than this engine's (None = any). One that names it is the reader's acknowledgement:
    only the handle tells the incarnation."""

    handoff_id: int
    incarnation: str | None = None


class FollowHandoff(msgspec.Struct, tag="follow"):
    """A generation worker has made room for this hand-off, and is to be told how it comes along."""

    handoff_id: int


class UnfollowHandoff(msgspec.Struct, tag="unfollow"):
    """It is gone. The hand-off itself is released by ReleaseHandoff."""

    handoff_id: int


class Arrival(msgspec.Struct, tag="arrival", omit_defaults=True):
    """What the context worker tells of a hand-off that a request awaits; the fields of HandoffProgress."""

    request_id: str
    first: int = 0
    block_ids: list[int] = []
    generations: list[int] = []
    handle: Handle | None = None
    done: bool = False
    error: str | None = None


class SnapshotEvents(msgspec.Struct, tag="snapshot"):
    """Answered by an `Events` message with `snapshot_id` set and one event (cleared, all resident keys)."""

    snapshot_id: int


class SetDelays(msgspec.Struct, tag="delays"):
    """Test seam, honoured only when the engine was started with fault injection: seconds to wait at named stages
    ("step", "prefill_chunk", "fetch", "publish"); a missing name means no delay."""

    seconds: dict[str, float]


class Shutdown(msgspec.Struct, tag="shutdown"):
    pass


ToEngine = (
    Submit | Abort | ReleaseHandoff | FollowHandoff | UnfollowHandoff | Arrival | SnapshotEvents | SetDelays | Shutdown
)


# ---------------------------------------------------------------- from the engine


class Ready(msgspec.Struct, tag="ready"):
    fingerprint: Fingerprint
    incarnation: str
    num_blocks: int
    block_size: int
    block_bytes: int
    max_seq_len: int
    vocab_size: int
    eos_token_ids: list[int]
    transfers: list[str]  # "shm", "nixl", "mooncake", "pool": fastest first
    transfer_choice: str = ""  # which of them serve, and why the others do not
    kv_cache_hash_algo: str | None = None  # of POST /kv_cache_events, if it is served


class Loading(msgspec.Struct, tag="loading"):
    """Progress of start-up, for the log: stage "weights" | "cache" | "pool" | "warm-up", 0 <= done <= 1."""

    stage: str
    done: float


class TokenLogprob(msgspec.Struct, array_like=True):
    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class Timing(msgspec.Struct, omit_defaults=True):
    """Seconds since the engine received the request, on the engine's monotonic clock."""

    scheduled: float = 0.0  # left the waiting queue
    fetched: float | None = None  # KV from elsewhere arrived, or was given up
    first_token: float = 0.0
    fetch_path: str | None = None  # "shm", "pool", "recompute"; None: nothing was to be fetched
    fetched_blocks: int = 0
    fetch_bytes: int = 0


class Output(msgspec.Struct, tag="output", omit_defaults=True):
    """New tokens of one choice. The first output of a request carries `cached_tokens`, `timing` and, if they were asked
    for, `prompt_logprobs`: of the prompt's tokens from the second on, since nothing predicts the first. A context-only
    request ends with one output a choice, the last of which carries `handle` (none if every choice finished)."""

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None  # "stop" | "length"; context-only: "not_finished" when decoding is to go on
    stop_reason: int | None = None  # the stop token's id, when one of stop_token_ids ended it (None for EOS)
    cached_tokens: int | None = None
    timing: Timing | None = None
    handle: Handle | None = None
    starts: list[StartState] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


class Failed(msgspec.Struct, tag="failed", omit_defaults=True):
    """The request is over. `code` is a key of kvstore.errors.SERVING_ERRORS."""

    request_id: str
    code: str
    message: str
    param: str | None = None


class HandoffProgress(msgspec.Struct, tag="progress", omit_defaults=True):
    """Generation_first: pages `first` .. of the prompt can be read. The first one carries a handle without pages and
    tokens, the last one (`done`) the whole handle, or why there is none."""

    handoff_id: int
    first: int
    block_ids: list[int]
    generations: list[int]
    handle: Handle | None = None
    done: bool = False
    error: str | None = None


class HandoffWanted(msgspec.Struct, tag="wanted", omit_defaults=True):
    """Generation_first: follow this hand-off at its source, and pass on what it tells as `Arrival`. Not `wanted`: stop
    that, nobody waits for it any more."""

    request_id: str
    handoff_id: int
    source: str
    wanted: bool = True


class HandoffFetched(msgspec.Struct, tag="fetched"):
    """The reader is through with the handle's pages (successfully or not): acknowledge to its endpoint."""

    request_id: str
    handoff_id: int
    incarnation: str
    endpoint: str
    ok: bool


class Stats(msgspec.Struct, tag="stats", omit_defaults=True):
    """Gauges and counters, sent after a step that changed them and at most every 50 ms while busy, once when idle."""

    blocks_total: int = 0
    blocks_used: int = 0  # referenced by running or fetching requests
    blocks_reusable: int = 0  # unreferenced, kept as prefix cache
    blocks_pinned: int = 0  # held by open hand-offs or unfinished puts
    blocks_free: int = 0
    blocks_quarantined: int = 0  # of the pinned ones: a read that was given up may still write to them
    requests_running: int = 0
    requests_waiting: int = 0
    requests_fetching: int = 0
    requests_paused: int = 0  # preempted, to be computed again
    preemptions: int = 0
    tokens_recomputed: int = 0  # for choices that were preempted after their first token
    host_blocks_total: int = 0  # of the host memory tier
    host_blocks_used: int = 0
    blocks_offloaded: int = 0
    blocks_onboarded: int = 0
    handoffs_open: int = 0
    steps: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_local: int = 0  # from this worker's prefix cache
    prompt_tokens_remote: int = 0  # from another worker by a hand-off
    prompt_tokens_pool: int = 0  # from the Mooncake pool
    generated_tokens: int = 0
    blocks_evicted: int = 0
    handoffs_offered: int = 0
    handoffs_done: int = 0
    handoffs_released: int = 0
    handoffs_expired: int = 0
    fetch_failures: dict[str, int] = {}  # by cause
    fetch_bytes: int = 0
    fetch_blocks: int = 0
    pool_put_blocks: int = 0
    pool_put_failures: int = 0
    pool_state: str = "off"  # "off" | "up" | "degraded: <reason>"
    iter_latency_ms: float = 0.0


class Events(msgspec.Struct, tag="events", omit_defaults=True):
    """Prefix-cache changes since the last message, in order."""

    events: list[KvEvent]
    snapshot_id: int | None = None


class Feed(msgspec.Struct, tag="feed"):
    """New records of a list that is read, and thereby emptied, over HTTP: "iterations", "requests", "cache_events".
    Each item is JSON."""

    name: str
    items: list[bytes]


class Fatal(msgspec.Struct, tag="fatal", omit_defaults=True):
    """The engine cannot go on; the process exits after this. `problems`: those of a SettingsError, if it was one."""

    message: str
    problems: list[tuple[str, str]] = []


FromEngine = (
    Ready | Loading | Output | Failed | HandoffFetched | HandoffProgress | HandoffWanted | Stats | Events | Feed | Fatal
)
