"""Who may begin: requests wait here, before prefill, while the workers of a role have as many as they should.

A request that was let in runs both its legs; nothing waits between them. Waiting costs a future and no worker; a client
that leaves the queue costs nothing more.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence

from kvstore.errors import NotReady, Overloaded
from router.config import AdmissionConfig
from router.policy import Policy
from router.worker import Worker


class Admission:
    """`refused` and `expired` count requests that were turned away at once, and after waiting in vain."""

    def __init__(self, config: AdmissionConfig, context: Policy, generation: Policy) -> None:
        self._config = config
        self._context, self._generation = context, generation
        self._context_limit = self._generation_limit = math.inf
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._let_in = 0  # woken, and not reserved yet
        self.refused = 0
        self.expired = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def set_limits(self, contexts: Sequence[Worker], generations: Sequence[Worker]) -> None:
        """The usable workers have changed."""
        self._context_limit = self._limit(contexts)
        self._generation_limit = self._limit(generations)
        self.changed()

    def _limit(self, workers: Sequence[Worker]) -> float:
        """Unlimited where a worker does not tell its batch, and without workers: then no worker is the answer."""
        places = [worker.info.max_batch_size for worker in workers]
        known = [place for place in places if place]
        if not known or len(known) < len(places):
            return math.inf
        return max(1.0, sum(known) * self._config.saturation)

    def _has_room(self) -> bool:
        return (
            self._context.in_flight + self._let_in < self._context_limit
            and self._generation.in_flight + self._let_in < self._generation_limit
        )

    def check(self) -> None:
        """Raises Overloaded if a request that came now could not even wait."""
        if len(self._waiting) >= self._config.max_queue_size and not self._has_room():
            self.refused += 1
            role = "context" if self._context.in_flight >= self._context_limit else "generation"
            raise Overloaded(
                f"the {role} workers have all the requests that they should, and {len(self._waiting)} wait already",
                retry_after=self._config.queue_timeout_sec / 2,
            )

    async def enter(self) -> None:
        """Returns when the request may reserve its workers, which it must do before it awaits anything else.

        Raises Overloaded, or NotReady when its time in the queue is up.
        """
        if not self._waiting and self._has_room():
            return
        self.check()
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            async with asyncio.timeout(self._config.queue_timeout_sec):
                await place
        except TimeoutError:
            self.expired += 1
            raise NotReady(f"no worker had room within {self._config.queue_timeout_sec:g} s", retry_after=1.0) from None
        finally:
            if place.done() and not place.cancelled():
                self._let_in -= 1
            elif place in self._waiting:
                self._waiting.remove(place)
            asyncio.get_running_loop().call_soon(self.changed)  # one that was let in and left makes room

    def changed(self) -> None:
        """There may be room."""
        while self._waiting and self._has_room():
            place = self._waiting.popleft()
            if not place.done():
                self._let_in += 1
                place.set_result(None)
