"""The context side of generation_first: prompts are computed when their reader is there, and told of chunk by chunk.

    held ──reader comes──► queued ──chunks──► HandoffProgress … ──first tokens──► HandoffProgress with the whole handle

A prompt whose reader has no room yet is not begun: prefill then follows the order in which generation workers have made
room, and neither side holds blocks that wait for the other's. Reader and request may come in any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from engine.messages import FromEngine, HandoffProgress
from engine.offers import Offers
from engine.scheduler import Scheduler
from engine.sequence import Phase, Request
from kvstore.handoff import Handle, StartState


@dataclasses.dataclass(slots=True)
class _Held:
    request: Request
    deadline: float


class Readers:
    """By hand-off id. `timeout` seconds for the one that came first to be joined by the other."""

    def __init__(
        self,
        scheduler: Scheduler,
        offers: Offers,
        say: Callable[[FromEngine], None],
        timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._offers = offers
        self._say = say
        self._timeout = timeout
        self._clock = clock
        self._early: dict[int, float] = {}  # readers whose request has not come: deadline
        self._held: dict[int, _Held] = {}
        self._announced: dict[int, int] = {}  # blocks that the reader has been told of

    def hold(self, request: Request) -> bool:
        """True when the request is to wait for its reader, outside the queue."""
        if not request.waits_for_reader or request.handoff_id is None:
            return False
        if self._early.pop(request.handoff_id, None) is not None:
            self._announced[request.handoff_id] = 0
            return False
        request.phase = Phase.HELD
        self._held[request.handoff_id] = _Held(request, self._clock() + self._timeout)
        return True

    def follow(self, handoff_id: int) -> None:
        """A reader has made room."""
        held = self._held.pop(handoff_id, None)
        if held is not None:
            self._announced[handoff_id] = 0
            self._scheduler.add(held.request)
        elif handoff_id not in self._announced:
            self._early[handoff_id] = self._clock() + self._timeout

    def unfollow(self, handoff_id: int) -> None:
        self._early.pop(handoff_id, None)

    def progress(self, request: Request) -> None:
        """Some of the prompt's KV is there."""
        if request.handoff_id is None or (told := self._announced.get(request.handoff_id)) is None:
            return
        prompt = request.choices[0]
        full = min(prompt.computed // self._scheduler.capacity.block_size, len(prompt.table))
        if full <= told:
            return
        part = prompt.table[told:full]
        opening = None if told else self._offers.describe(request, (), ())
        generations = self._offers.generations(part)
        self._say(HandoffProgress(request.handoff_id, told, list(part), generations, handle=opening))
        self._announced[request.handoff_id] = full

    def complete(self, request: Request, starts: Sequence[StartState], handle: Handle | None) -> None:
        """`handle` None: the first tokens ended the answer, and no blocks are offered."""
        if request.handoff_id is None or self._announced.pop(request.handoff_id, None) is None:
            return
        handle = handle or self._offers.describe(request, starts, ())
        self._say(HandoffProgress(request.handoff_id, 0, [], [], handle=handle, done=True))

    def drop(self, request: Request, reason: str) -> None:
        """The request is over. If its reader was not told all, it is told that nothing more comes."""
        handoff_id = request.handoff_id
        if handoff_id is None:
            return
        self._held.pop(handoff_id, None)
        if self._announced.pop(handoff_id, None) is not None:
            self._say(HandoffProgress(handoff_id, 0, [], [], done=True, error=reason))

    def expire(self) -> list[Request]:
        """Readers without a request are told; requests without a reader are returned, to be failed."""
        now = self._clock()
        for handoff_id in [key for key, deadline in self._early.items() if deadline <= now]:
            del self._early[handoff_id]
            reason = f"no request for hand-off {handoff_id} has come"
            self._say(HandoffProgress(handoff_id, 0, [], [], done=True, error=reason))
        return [held.request for held in self._held.values() if held.deadline <= now]

    def next_deadline(self) -> float | None:
        return min([*self._early.values(), *(held.deadline for held in self._held.values())], default=None)

    def __repr__(self) -> str:
        return f"Readers(early {len(self._early)}, held {len(self._held)}, followed {len(self._announced)})"
