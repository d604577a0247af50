"""What the HTTP side needs of an engine. engine.client.EngineClient is the real one; tests have a scripted one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from engine.feeds import Feeds
from engine.mailbox import Mailbox
from engine.messages import Arrival, HandoffFetched, HandoffProgress, HandoffWanted, Output, Ready, Stats, Submit
from kvstore.protocol import KvEvent


class Outputs(Protocol):
    """The outputs of one request, until every choice has ended. Raises ServingError."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def __anext__(self) -> Output: ...

    async def aclose(self) -> None:
        """Aborts the request if it is still running."""
        ...


class Engine(Protocol):
    on_handoff_wanted: Callable[[HandoffWanted], None] | None
    """Called on the event loop when a request here awaits a hand-off, and when it no longer does."""
    on_handoff_fetched: Callable[[HandoffFetched], None] | None
    """Called on the event loop when this engine is through with another worker's pages."""
    feeds: Feeds
    """Records since they were last read, each JSON: of "iterations", "requests" and "cache_events"."""

    @property
    def ready(self) -> Ready: ...

    @property
    def stats(self) -> Stats: ...

    @property
    def alive(self) -> bool: ...

    def submit(self, request: Submit, /) -> Outputs: ...

    def release_handoff(self, handoff_id: int, incarnation: str | None = None) -> None: ...

    def follow_handoff(self, handoff_id: int) -> Mailbox[HandoffProgress]:
        """What becomes of a hand-off, for its reader; one reader each. To be closed."""
        ...

    def arrive(self, message: Arrival) -> None:
        """What another worker has told of an awaited hand-off."""
        ...

    def set_delays(self, seconds: dict[str, float]) -> None: ...

    def subscribe_events(self) -> AsyncIterator[KvEvent]:
        """First a snapshot (cleared, all resident keys), then every change."""
        ...
