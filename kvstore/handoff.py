"""The hand-off of one prompt's KV blocks, from the worker that computed them to the worker that decodes.

offered ──fetch──► fetching ──ack──► done
   │                  │ ▲
   │ release          │ └── (a failed fetch acknowledges too: the reader recomputes)
   ├─────────────────►┴──────────► released
   └─ deadline ──────────────────► expired
"""

from __future__ import annotations

import base64
import binascii

import msgspec

from kvstore.errors import InvalidRequest

HANDLE_VERSION = 1
_MAX_HANDLE_CHARS = 8 * 1024 * 1024


class SharedMemory(msgspec.Struct, frozen=True):
    """Where another process of the same host finds a worker's block pool: a memfd, dead with its owner."""

    host_id: str  # boot id and pid namespace: equal only where /proc/<pid>/fd/<fd> can be opened
    pid: int
    fd: int
    size: int  # bytes of the whole mapping


class StartState(msgspec.Struct, frozen=True):
    """One choice after prefill. The holder of these runs on as if it had sampled the first token itself."""

    index: int  # choice index in the answer
    token: int  # first generated token
    seed: int  # sampler seed of this choice; the position is the count of tokens generated so far
    finish_reason: str | None = None  # set when the first token ended the choice
    stop_reason: int | None = None
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None


class Handle(msgspec.Struct, frozen=True):
    """What a context worker gives out for one request; opaque to the router (`encoded_opaque_state`)."""

    version: int
    handoff_id: int  # the disagg_request_id
    incarnation: str  # of the context worker's start
    fingerprint: str  # Fingerprint.digest()
    endpoint: str  # host:port of the context worker, for the acknowledgement
    prompt_tokens: int  # tokens whose KV the blocks hold; the last block may be partial
    block_ids: list[int]
    generations: list[int]  # owner count of each page when offered: a page read later with another count is stale
    starts: list[StartState]
    cached_tokens: int = 0  # prompt tokens that the context worker did not compute
    cache_salt: str = ""
    shared_memory: SharedMemory | None = None
    pool: bool = False  # the full blocks are (being) put into the Mooncake pool under their block keys

    def encode(self) -> str:
        return base64.b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def decode(cls, text: str) -> Handle:
        """Raises InvalidRequest naming `disaggregated_params.encoded_opaque_state` for anything but a whole handle."""
        param = "disaggregated_params.encoded_opaque_state"
        if len(text) > _MAX_HANDLE_CHARS:
            raise InvalidRequest(f"{param}: {len(text)} characters, at most {_MAX_HANDLE_CHARS}", param=param)
        try:
            handle = msgspec.msgpack.decode(base64.b64decode(text, validate=True), type=cls)
        except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
            raise InvalidRequest(f"{param}: not a hand-off handle ({error})", param=param) from None
        if handle.version != HANDLE_VERSION:
            raise InvalidRequest(f"{param}: version {handle.version}, this worker reads {HANDLE_VERSION}", param=param)
        if len(handle.block_ids) != len(handle.generations) or not handle.starts or handle.prompt_tokens < 1:
            raise InvalidRequest(f"{param}: the handle's fields contradict each other", param=param)
        return handle
