"""What the engine loop has to say, collected over one turn and sent in one piece."""

from __future__ import annotations

from collections.abc import Callable

from engine.messages import Events, FromEngine, Stats
from engine.offers import Offers
from engine.scheduler import Scheduler
from engine.statistics import Statistics
from kvstore.protocol import KvEvent
from kvstore.transceivers.base import BlockStore

STATS_INTERVAL = 0.05  # seconds between two Stats while busy


class Outbox:
    """Keeps messages in order; cache events and Stats are added when they are due."""

    def __init__(self, send: Callable[[list[FromEngine]], None], clock: Callable[[], float]) -> None:
        self.stats = Stats()  # the counters in it are written by whoever counts
        self._send = send
        self._clock = clock
        self._messages: list[FromEngine] = []
        self._sent = Stats()
        self._sent_at = float("-inf")

    def say(self, message: FromEngine) -> None:
        self._messages.append(message)

    def say_events(self, events: list[KvEvent]) -> None:
        if events:
            self.say(Events(events))

    def flush(
        self,
        scheduler: Scheduler,
        offers: Offers,
        store: BlockStore | None,
        pausing: bool,
        statistics: Statistics | None = None,
    ) -> None:
        """`pausing`: there may be no next turn for a while, so that Stats cannot wait for it."""
        self.say_events(scheduler.blocks.drain_events())
        now = self._clock()
        if pausing or now >= self._sent_at + STATS_INTERVAL:
            self._gauge(scheduler, offers, store)
            if self.stats != self._sent:
                self._sent = _copy(self.stats)
                self._sent_at = now
                self.say(self._sent)
            if statistics is not None:
                self._messages += statistics.take()
        if self._messages:
            messages, self._messages = self._messages, []
            self._send(messages)

    def _gauge(self, scheduler: Scheduler, offers: Offers, store: BlockStore | None) -> None:
        stats, blocks = self.stats, scheduler.blocks
        stats.blocks_total = blocks.num_blocks
        stats.blocks_used = blocks.used
        stats.blocks_reusable = blocks.reusable
        stats.blocks_pinned = blocks.pinned
        stats.blocks_free = blocks.free
        stats.blocks_evicted = blocks.evicted
        stats.requests_running = scheduler.requests_running
        stats.requests_waiting = len(scheduler.waiting)
        stats.requests_fetching = len(scheduler.fetching)
        stats.requests_paused = scheduler.requests_paused
        stats.preemptions = scheduler.preemptions
        if blocks.host is not None:
            stats.host_blocks_total = blocks.host.num_blocks
            stats.host_blocks_used = len(blocks.host)
            stats.blocks_offloaded = blocks.host.offloaded
            stats.blocks_onboarded = blocks.host.onboarded
        stats.handoffs_open = len(offers.table)
        stats.pool_state = store.state() if store is not None else "off"


def _copy(stats: Stats) -> Stats:
    values = {name: getattr(stats, name) for name in Stats.__struct_fields__}
    return Stats(**values | {"fetch_failures": dict(stats.fetch_failures)})
