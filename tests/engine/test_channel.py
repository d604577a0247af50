from __future__ import annotations

import socket
import threading

import pytest

from engine.channel import MAX_FRAME, Channel, FrameError, FrameSplitter, frame


@pytest.mark.parametrize("size", [1, 3, 4, 7, 1000])
def test_pieces_of_any_size_become_the_same_payloads(size: int) -> None:
    payloads = [b"", b"a", b"x" * 300, b"end"]
    data = b"".join(map(frame, payloads))
    splitter = FrameSplitter()
    found = []
    for start in range(0, len(data), size):
        found += splitter.feed(data[start : start + size])
    assert found == payloads


def test_an_absurd_length_is_an_error_and_not_an_allocation() -> None:
    with pytest.raises(FrameError, match="at most"):
        FrameSplitter().feed((MAX_FRAME + 1).to_bytes(4, "little"))


def test_channel_both_ways_until_the_end() -> None:
    left, right = socket.socketpair()
    a, b = Channel(left), Channel(right)
    big = b"y" * 3_000_000
    sender = threading.Thread(target=a.send, args=([b"one", big, b"two"],))
    sender.start()
    assert [b.receive() for _ in range(3)] == [b"one", big, b"two"]
    sender.join()
    b.send([b"back"])
    assert a.receive() == b"back"
    b.close()
    assert a.receive() is None
    a.send([b"into the void"])
    a.close()
