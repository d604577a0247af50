"""What the client's channel hands to one consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """An async iterator fed without tasks or locks: `put` and `end` are plain calls on the event loop.

    One consumer. `on_leave` is called when it goes before the end: by `close` or by a cancelled wait.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False

    def __len__(self) -> int:
        return len(self._items)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            await self._wait()
        return self._items.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Nothing comes out after this."""
        self._items.clear()
        if not self.ended:
            self.end()
            self.on_leave()

    def on_leave(self) -> None:
        pass

    def put(self, item: T) -> None:
        self._items.append(item)
        self._wake()

    def clear(self) -> None:
        self._items.clear()

    def end(self, error: Exception | None = None) -> None:
        """What was put before is still delivered; then the iteration stops, or raises `error`."""
        self.ended = True
        self._error = error
        self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
