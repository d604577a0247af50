"""The event stream of the client, without an engine."""

from __future__ import annotations

from typing import cast

import pytest

import engine.client
from engine.client import EngineClient, EventStream
from engine.messages import Events
from kvstore.protocol import KvEvent


class Asked:
    def __init__(self) -> None:
        self.snapshots = 0

    def _ask_snapshot(self) -> int:
        self.snapshots += 1
        return self.snapshots


def stored(key: bytes) -> KvEvent:
    return KvEvent(stored=[key])


def snapshot(number: int, *keys: bytes) -> Events:
    return Events([KvEvent(cleared=True, stored=list(keys))], snapshot_id=number)


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def stream(asked: Asked) -> EventStream:
    return EventStream(cast("EngineClient", asked))


async def test_nothing_before_the_own_snapshot_and_everything_after(stream: EventStream) -> None:
    stream.take(Events([stored(b"before")]))
    stream.take(snapshot(9, b"another's"))
    stream.take(snapshot(1, b"a"))
    stream.take(Events([stored(b"b"), KvEvent(removed=[b"a"])]))
    stream.take(snapshot(9, b"another's"))
    stream.take(Events([stored(b"c")]))
    stream.end()
    assert [event async for event in stream] == [
        KvEvent(cleared=True, stored=[b"a"]),
        stored(b"b"),
        KvEvent(removed=[b"a"]),
        stored(b"c"),
    ]


async def test_a_reader_far_behind_gets_a_new_snapshot(
    stream: EventStream, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.client, "_MAX_QUEUED_EVENTS", 3)
    stream.take(snapshot(1))
    for number in range(10):
        stream.take(Events([stored(bytes([number]))]))
    assert asked.snapshots == 2
    stream.take(snapshot(2, b"all"))
    stream.take(Events([stored(b"next")]))
    stream.end()
    assert [event async for event in stream] == [KvEvent(cleared=True, stored=[b"all"]), stored(b"next")]
