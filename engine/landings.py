"""The generation side of generation_first: room is made first, blocks are fetched while the prompt is computed.

    begin: allocate, ask for the prompt ──► blocks are announced ──► fetch them ──► … ──► the whole handle ──► the rest
    is an ordinary fetch, with an ordinary acknowledgement

When nothing more is to come, the prompt goes back to the queue and is computed here; what has arrived is in the prefix
cache then.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import msgspec

from engine.exchange import Exchange
from engine.messages import Arrival, FromEngine, HandoffWanted, Submit
from engine.scheduler import Scheduler
from engine.sequence import ModelFacts, Phase, Request, check_handle
from engine.transfers import FetchJob
from kvstore.errors import HandoffRefused, ServingError
from kvstore.handoff import Handle


@dataclasses.dataclass(slots=True, eq=False)
class _Landing:
    request: Request
    first: int  # index in the prompt of blocks[0]
    blocks: list[int]  # pinned from `loaded` on
    loaded: int = 0
    ids: list[int] = dataclasses.field(default_factory=list)  # announced, of the whole prompt
    generations: list[int] = dataclasses.field(default_factory=list)
    opening: Handle | None = None
    final: Handle | None = None
    job: FetchJob | None = None
    lost: str | None = None  # nothing more comes, for this reason


class Landings:
    """By request id. `start(request, satisfied)` and `fail` are the loop's."""

    def __init__(
        self,
        scheduler: Scheduler,
        exchange: Exchange,
        facts: ModelFacts,
        fetch_timeout: float,
        say: Callable[[FromEngine], None],
        start: Callable[[Request, bool], None],
        fail: Callable[[Request, ServingError], None],
        restart: Callable[[Request], None],
    ) -> None:
        self._scheduler = scheduler
        self._exchange = exchange
        self._facts = facts
        self._fetch_timeout = fetch_timeout
        self._say = say
        self._start = start
        self._fail = fail
        self._restart = restart
        self._open: dict[str, _Landing] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, request: Request) -> bool:
        """Make room for an admitted request that waits for a hand-off. False if it is none."""
        if request.awaits is None:
            return False
        first = len(request.choices[0].table)
        blocks = self._scheduler.fetch(request, self._scheduler.capacity.blocks(len(request.prompt_ids)) - first)
        self._scheduler.blocks.pin(blocks)
        self._open[request.id] = _Landing(request, first, blocks)
        self._say(HandoffWanted(request.id, request.awaits, request.source))
        return True

    def arrived(self, message: Arrival) -> None:
        landing = self._open.get(message.request_id)
        if landing is None or landing.final is not None:
            return
        if message.error is not None:
            landing.lost = message.error
        elif message.first == len(landing.ids):
            landing.ids += message.block_ids
            landing.generations += message.generations
        if message.handle is not None:
            try:
                self._check(landing.request, message.handle, message.done)
            except ServingError as error:
                self._fail(landing.request, error)
                return
            landing.opening = landing.opening or message.handle
            landing.final = message.handle if message.done else None
        self._pump(landing)

    def fetched(self, job: FetchJob) -> None:
        """Of a job that this class started."""
        if job.unsettled is not None:
            self._exchange.quarantine(job.blocks, job.unsettled)
        self._exchange.count(job)
        landing = self._open.get(job.request_id)
        if landing is None or landing.job is not job:
            self._scheduler.blocks.unpin(job.blocks)
            return
        landing.job = landing.request.fetch = None
        if job.unsettled is not None:
            landing.lost = landing.lost or "a read did not end in time"
        else:
            self._take(landing, job)
        if job.failures and landing.final is None and landing.lost is None:
            return  # the next announcement, or the whole handle, is another try
        self._pump(landing)

    def drop(self, request: Request) -> None:
        """The request is over."""
        landing = self._open.pop(request.id, None)
        if landing is None:
            return
        held = landing.loaded
        if landing.job is not None:
            held += len(landing.job.blocks)
            self._exchange.cancel(landing.job)
        self._scheduler.blocks.unpin(landing.blocks[held:])
        self._unwanted(request)

    # ------------------------------------------------------------ steps

    def _check(self, request: Request, handle: Handle, done: bool) -> None:
        if (reason := handle.mismatch(self._facts.fingerprint, self._facts.identity)) is not None:
            raise HandoffRefused(reason)
        if done and handle.block_ids:
            submit = Submit(request.id, request.prompt_ids, request.sampling, handle=handle)
            check_handle(submit, handle, self._facts, self._scheduler.capacity)

    def _take(self, landing: _Landing, job: FetchJob) -> None:
        request = landing.request
        size = self._scheduler.capacity.block_size
        arrived = landing.blocks[landing.loaded : landing.loaded + job.loaded]
        landing.loaded += job.loaded
        self._scheduler.blocks.unpin(arrived)
        prompt = request.choices[0]
        found = self._scheduler.advance(prompt, min(len(arrived) * size, len(prompt.tokens) - prompt.computed))
        if job.handle is not None and not job.handle.pool:
            self._exchange.publish(found)

    def _pump(self, landing: _Landing) -> None:
        if landing.job is not None:
            if landing.lost is not None:
                self._exchange.cancel(landing.job)
        elif landing.lost is not None:
            self._give_up(landing)
        elif landing.final is not None:
            self._finish(landing, landing.final)
        else:
            self._fetch_announced(landing)

    def _fetch_announced(self, landing: _Landing) -> None:
        start = landing.first + landing.loaded
        end = min(len(landing.ids), landing.first + len(landing.blocks))
        if end <= start or landing.opening is None:
            return
        request = landing.request
        landing.job = request.fetch = FetchJob(
            request_id=request.id,
            blocks=landing.blocks[landing.loaded : end - landing.first],
            keys=request.prompt_keys[start:end],
            first=start,
            deadline=time.monotonic() + self._fetch_timeout,
            handle=msgspec.structs.replace(
                landing.opening, block_ids=list(landing.ids), generations=list(landing.generations)
            ),
            ahead=True,
        )
        self._exchange.run(landing.job)

    def _finish(self, landing: _Landing, handle: Handle) -> None:
        request = self._open.pop(landing.request.id).request
        rest = landing.blocks[landing.loaded :]
        request.take_handle(handle)
        request.cached_tokens = handle.cached_tokens
        if not handle.block_ids:
            # Every choice ended with its first token: nobody will read this prompt's KV here.
            self._scheduler.blocks.unpin(rest)
            request.choices[0].computed = len(request.prompt_ids)
            self._start(request, True)
            return
        self._exchange.accept(request)
        if rest:
            self._exchange.fetch_rest(request, rest, landing.first + landing.loaded)
        else:
            self._exchange.through(request, ok=True)
            self._start(request, True)

    def _give_up(self, landing: _Landing) -> None:
        request = self._open.pop(landing.request.id).request
        self._scheduler.blocks.unpin(landing.blocks[landing.loaded :])
        self._exchange.note_failure("arrival")
        self._unwanted(request)
        request.awaits = None
        assert request.phase is Phase.FETCHING
        self._restart(request)

    def _unwanted(self, request: Request) -> None:
        self._say(HandoffWanted(request.id, request.awaits or 0, request.source, wanted=False))
