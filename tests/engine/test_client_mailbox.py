from __future__ import annotations

import asyncio

import pytest

from engine.mailbox import Mailbox


class Box(Mailbox[int]):
    left = 0

    def on_leave(self) -> None:
        self.left += 1


async def test_items_in_order_then_the_end() -> None:
    box = Box()
    box.put(1)
    box.put(2)
    box.end()
    assert [item async for item in box] == [1, 2] and box.left == 0


async def test_an_error_comes_after_what_was_put_before() -> None:
    box = Box()
    box.put(1)
    box.end(KeyError("late"))
    assert await anext(box) == 1
    for _ in range(2):
        with pytest.raises(KeyError):
            await anext(box)


async def test_a_waiting_consumer_is_woken() -> None:
    box = Box()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(box.__anext__())
        await asyncio.sleep(0)
        box.put(5)
        box.put(6)
    assert waiting.result() == 5 and len(box) == 1


async def test_leaving_early_is_told_once() -> None:
    box = Box()
    box.put(1)
    async with box:
        pass
    await box.aclose()
    assert box.left == 1 and [item async for item in box] == []


async def test_leaving_after_the_end_is_not_told() -> None:
    box = Box()
    box.end()
    box.close()
    assert box.left == 0


async def test_a_cancelled_wait_is_leaving() -> None:
    box = Box()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(box)
    assert box.left == 1 and box.ended
