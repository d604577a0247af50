"""The holder's side of hand-offs: prompts computed here whose blocks wait for their reader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from engine.blocks import BlockPool
from engine.messages import ReleaseHandoff, Stats
from engine.sequence import Request
from kvstore.handoff import HANDLE_VERSION, Handle, Handoff, HandoffState, HandoffTable, SharedMemory, StartState
from kvstore.handoff import prompt_digest as digest_of
from kvstore.protocol import Fingerprint
from kvstore.transceivers.base import Transceiver


class Pages(Protocol):
    """The bytes behind the block numbers, readable by other processes (kvstore.transceivers.shm.SharedPool)."""

    block_bytes: int

    def block(self, block: int) -> memoryview: ...

    def generation(self, block: int) -> int: ...

    def descriptor(self) -> SharedMemory: ...


class Offers:
    """Pins the blocks of each offered prompt until its hand-off ends; counts ends in `stats`."""

    def __init__(
        self,
        blocks: BlockPool,
        pages: Pages,
        stats: Stats,
        *,
        incarnation: str,
        fingerprint: str,
        endpoint: str,
        timeout: float,
        shares_memory: bool,
        puts_to_pool: bool,
        clock: Callable[[], float],
        transceivers: Iterable[Transceiver] = (),
        identity: Fingerprint | None = None,
    ) -> None:
        self._transceivers = tuple(transceivers)
        described = ((each.name, each.descriptor()) for each in self._transceivers)
        self._remotes = {name: remote for name, remote in described if remote is not None}
        self._identity = identity
        self.table: HandoffTable[int] = HandoffTable(incarnation, timeout, self._ended, clock)
        self._blocks = blocks
        self._pages = pages
        self._stats = stats
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._endpoint = endpoint
        self._shared_memory = pages.descriptor() if shares_memory else None
        self._puts_to_pool = puts_to_pool

    def offer(self, request: Request, starts: Sequence[StartState]) -> Handle:
        """To be called while the request still holds its blocks. HandoffConflict if the id is open."""
        assert request.handoff_id is not None
        table = request.choices[0].table
        handle = self.describe(request, starts, table)
        self._blocks.pin(table)
        self._stats.handoffs_offered += 1
        self.table.offer(request.handoff_id, table)
        self._tell_transceivers()
        return handle

    def describe(self, request: Request, starts: Sequence[StartState], table: Sequence[int]) -> Handle:
        """The handle of a hand-off; without blocks while it is still being made."""
        assert request.handoff_id is not None
        self._tell_transceivers(ahead=True)
        return Handle(
            version=HANDLE_VERSION,
            handoff_id=request.handoff_id,
            incarnation=self._incarnation,
            fingerprint=self._fingerprint,
            endpoint=self._endpoint,
            prompt_tokens=len(request.prompt_ids),
            block_ids=list(table),
            generations=self.generations(table),
            starts=list(starts),
            cached_tokens=request.cached_tokens,
            cache_salt=request.salt,
            shared_memory=self._shared_memory,
            pool=self._puts_to_pool,
            prompt_digest=digest_of(request.prompt_ids, request.salt),
            remotes=self._remotes,
            identity=self._identity,
            prompt_logprobs=[(each.token_id, each.logprob, each.top) for each in request.prompt_logprobs] or None,
        )

    def generations(self, table: Sequence[int]) -> list[int]:
        return [self._pages.generation(block) for block in table]

    def _tell_transceivers(self, ahead: bool = False) -> None:
        """`ahead`: a reader may come before the offer is open."""
        for transceiver in self._transceivers:
            transceiver.holding(ahead or len(self.table) > 0)

    def release(self, message: ReleaseHandoff) -> None:
        """A reader knows the incarnation from the handle and names it: that is the acknowledgement. The router, which
        does not look into handles, releases without one."""
        if message.incarnation is None:
            self.table.release(message.handoff_id)
        else:
            self.table.acknowledge(message.handoff_id, message.incarnation)

    def _ended(self, handoff: Handoff[int]) -> None:
        self._blocks.unpin(handoff.pages)
        self._tell_transceivers()
        match handoff.state:
            case HandoffState.DONE:
                self._stats.handoffs_done += 1
            case HandoffState.RELEASED:
                self._stats.handoffs_released += 1
            case HandoffState.EXPIRED:
                self._stats.handoffs_expired += 1
