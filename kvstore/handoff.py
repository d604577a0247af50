"""The hand-off of one prompt's KV blocks, from the worker that computed them to the worker that decodes.

    offered ──fetch──► fetching ──ack──► done
       │                  │
       ├──── release ─────┼────────────► released
       └──── deadline ────┴────────────► expired

`HandoffTable` runs this on both sides. The holder's pages are pinned from the offer to the end, and freed exactly once,
at whichever end comes first. The reader's are the pages that it fetches into.

What messages do that come twice, late, or for a hand-off that is not there:

    offer        of an open id               HandoffConflict
    offer        of an id released before    ends at once as released: the release overtook the offer
    fetch        again                       no change
    fetch        of an unknown or ended id   refused (False)
    ack          before any fetch            fetches by one-sided reads are not announced: both edges are taken
    ack, release of an ended id              no change, counted in `ignored`
    ack, release of an unknown id            remembered for one timeout, see offer
    any          of another incarnation      no change, counted in `ignored`
    release      after ack, or the reverse   the first one counts
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import msgspec

from kvstore.errors import InvalidRequest
from kvstore.hashing import block_keys
from kvstore.protocol import Fingerprint

HANDLE_VERSION = 1
_MAX_HANDLE_CHARS = 8 * 1024 * 1024


class SharedMemory(msgspec.Struct, frozen=True):
    """Where another process of the same host finds a worker's block pool: a memfd, dead with its owner."""

    host_id: str  # boot id and pid namespace: equal only where /proc/<pid>/fd/<fd> can be opened
    pid: int
    fd: int
    size: int  # bytes of the whole mapping


class RemoteMemory(msgspec.Struct, frozen=True):
    """Where a network transport finds a worker's block pool, laid out as in kvstore.transceivers.shm."""

    agent: str  # what the transport calls the worker: a name, or host:port
    base: int  # address of the mapping in the worker
    num_blocks: int
    block_bytes: int
    metadata: bytes = b""  # of the transport: connection addresses, keys


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
    prompt_digest: str = ""  # `prompt_digest` of the tokens; "" = not told
    remotes: dict[str, RemoteMemory] = {}  # by transceiver: "nixl", "mooncake"
    identity: Fingerprint | None = None  # what `fingerprint` is the digest of, so that a refusal can name both values
    # Of each prompt token from the second on, if asked for: id, log-probability, the best alternatives.
    prompt_logprobs: list[tuple[int, float, list[tuple[int, float]]]] | None = None

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

    def mismatch(self, fingerprint: str, identity: Fingerprint | None) -> str | None:
        """Why a worker of this fingerprint cannot use these blocks, with both values; None if it can."""
        if self.fingerprint == fingerprint:
            return None
        if self.identity is not None and identity is not None:
            different = "; ".join(identity.differences(self.identity))
        else:
            different = f"fingerprint: {fingerprint} here, {self.fingerprint} there"
        return f"the KV blocks of the worker at {self.endpoint} do not fit this worker's: {different}"


def prompt_digest(tokens: Sequence[int], salt: str = "") -> str:
    """32 hex digits over a whole prompt: tells apart prompts that agree in their full blocks."""
    return block_keys(tokens, len(tokens), salt)[0].hex()


class HandoffConflict(InvalidRequest):
    """An offer under an id that is in use."""


class HandoffState(enum.StrEnum):
    OFFERED = "offered"
    FETCHING = "fetching"
    DONE = "done"
    RELEASED = "released"
    EXPIRED = "expired"


OPEN_STATES = (HandoffState.OFFERED, HandoffState.FETCHING)


Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(slots=True)
class Handoff(Generic[Key]):
    key: Key
    pages: tuple[int, ...]
    deadline: float
    state: HandoffState = HandoffState.OFFERED


_REMEMBERED = 4096  # ended and early-released ids


class HandoffTable(Generic[Key]):
    """The open hand-offs of one worker's incarnation: the holder's by hand-off id, the reader's by request id. Not
    thread-safe: its owner is the engine loop.

    `on_end(handoff)` is called once for each offered hand-off, with its final state, when its pages are to be freed.
    Times are seconds of `clock`; `timeout` counts from the offer.
    """

    def __init__(
        self,
        incarnation: str,
        timeout: float,
        on_end: Callable[[Handoff[Key]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.edges: Counter[tuple[HandoffState | None, HandoffState]] = Counter()
        self.ignored = 0
        self._incarnation = incarnation
        self._timeout = timeout
        self._on_end = on_end
        self._clock = clock
        self._open: dict[Key, Handoff[Key]] = {}  # in order of offer, and so of deadline
        self._ended: OrderedDict[Key, None] = OrderedDict()
        self._released_early: OrderedDict[Key, float] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._open

    def __len__(self) -> int:
        return len(self._open)

    def __repr__(self) -> str:
        counts = {str(state): self.count(state) for state in OPEN_STATES}
        return f"HandoffTable({counts}, ended {len(self._ended)}, ignored {self.ignored})"

    def count(self, state: HandoffState) -> int:
        """Open states: how many are in it. End states: how many have ended in it so far."""
        if state in OPEN_STATES:
            return sum(handoff.state is state for handoff in self._open.values())
        return sum(number for (_, into), number in self.edges.items() if into is state)

    def offer(self, key: Key, pages: Sequence[int]) -> Handoff[Key]:
        """Takes over the pin of `pages`; HandoffConflict if the id is open, and then the pages stay the caller's."""
        if key in self._open:
            raise HandoffConflict(f"hand-off {key} is already open", param="disaggregated_params")
        self._ended.pop(key, None)
        now = self._clock()
        handoff = Handoff(key, tuple(pages), now + self._timeout)
        self._open[key] = handoff
        self.edges[None, HandoffState.OFFERED] += 1
        if self._released_early.pop(key, now) > now:
            self._end(handoff, HandoffState.RELEASED)
        return handoff

    def begin_fetch(self, key: Key, incarnation: str | None = None) -> bool:
        """False when there is nothing to fetch any more."""
        handoff = self._open.get(key)
        if handoff is None or not self._is_ours(incarnation):
            self.ignored += 1
            return False
        if handoff.state is HandoffState.OFFERED:
            self._move(handoff, HandoffState.FETCHING)
        return True

    def acknowledge(self, key: Key, incarnation: str | None = None) -> bool:
        """The reader is through with the pages, successfully or not. True if this ended the hand-off."""
        handoff = self._to_end(key, incarnation)
        if handoff is None:
            return False
        if handoff.state is HandoffState.OFFERED:
            self._move(handoff, HandoffState.FETCHING)
        self._end(handoff, HandoffState.DONE)
        return True

    def release(self, key: Key, incarnation: str | None = None) -> bool:
        """Nobody will read the pages. True if this ended the hand-off."""
        handoff = self._to_end(key, incarnation)
        if handoff is None:
            return False
        self._end(handoff, HandoffState.RELEASED)
        return True

    def expire(self) -> list[Handoff[Key]]:
        """Ends the hand-offs whose deadline has passed."""
        now = self._clock()
        late = list(itertools.takewhile(lambda handoff: handoff.deadline <= now, self._open.values()))
        for handoff in late:
            self._end(handoff, HandoffState.EXPIRED)
        return late

    def next_deadline(self) -> float | None:
        first = next(iter(self._open.values()), None)
        return None if first is None else first.deadline

    def _is_ours(self, incarnation: str | None) -> bool:
        return incarnation is None or incarnation == self._incarnation

    def _to_end(self, key: Key, incarnation: str | None) -> Handoff[Key] | None:
        handoff = self._open.get(key)
        if handoff is not None and self._is_ours(incarnation):
            return handoff
        self.ignored += 1
        if handoff is None and key not in self._ended and self._is_ours(incarnation):
            self._released_early[key] = self._clock() + self._timeout
            if len(self._released_early) > _REMEMBERED:
                self._released_early.popitem(last=False)
        return None

    def _move(self, handoff: Handoff[Key], state: HandoffState) -> None:
        self.edges[handoff.state, state] += 1
        handoff.state = state

    def _end(self, handoff: Handoff[Key], state: HandoffState) -> None:
        del self._open[handoff.key]
        self._move(handoff, state)
        self._ended[handoff.key] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        self._on_end(handoff)
