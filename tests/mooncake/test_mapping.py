"""Memory that one process lends and another maps, without a pool."""

from __future__ import annotations

import mmap
import socket
import threading
import weakref
from collections.abc import Iterator

import pytest
from pool_master import wait_until

from mooncake_pool import mapping
from mooncake_pool.client import Place
from mooncake_pool.lending import Lender, LentMemory, address_of, lender_name, populate
from mooncake_pool.mapping import SegmentMaps, connect_to_lender

SIZE = 1 << 20


class Holder:
    """A process that lends, as far as its sockets and its mapping go."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.lent = LentMemory(SIZE)
        self.memory = mmap.mmap(self.lent.fd, SIZE)
        self.lent.find_mapping()
        self.lender = Lender(self.lent)

    def place(self, offset: int, size: int = 64) -> Place:
        return Place(self.endpoint, self.lent.base + offset, size)

    def end(self) -> None:
        self.lender.close()
        self.listener.close()


@pytest.fixture
def holder() -> Iterator[Holder]:
    one = Holder()
    yield one
    one.end()


@pytest.fixture
def maps() -> Iterator[SegmentMaps]:
    every = SegmentMaps()
    yield every
    every.close()


def test_what_one_writes_the_other_reads(holder: Holder, maps: SegmentMaps) -> None:
    assert holder.lent.base == address_of(holder.memory)
    segment = maps.find(holder.endpoint)
    assert segment is not None and maps.find(holder.endpoint) is segment
    value = segment.value(holder.place(4096))
    assert value is not None
    value[:] = b"x" * 64
    assert holder.memory[4095:4161] == b"\0" + b"x" * 64 + b"\0"


def test_places_outside_the_segment_are_nothing(holder: Holder, maps: SegmentMaps) -> None:
    segment = maps.find(holder.endpoint)
    assert segment is not None
    for offset, size in ((-1, 64), (SIZE - 63, 64), (SIZE, 1), (0, SIZE + 1), (0, -1)):
        assert segment.value(holder.place(offset, size)) is None
    assert segment.value(holder.place(SIZE - 64)) is not None


def test_a_holder_that_ends_can_be_read_for_a_while_but_not_written(
    holder: Holder, maps: SegmentMaps, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = maps.find(holder.endpoint)
    assert segment is not None
    holder.end()
    assert maps.find(holder.endpoint) is segment and maps.find(holder.endpoint, to_write=True) is None
    maps.sweep()
    assert maps.find(holder.endpoint) is segment
    alive = weakref.ref(segment)
    del segment
    monkeypatch.setattr(mapping, "MASTER_FORGETS", -1.0)
    maps.sweep()
    assert maps.find(holder.endpoint) is None
    wait_until(lambda: alive() is None, 5, "the memory is let go")


def test_an_endpoint_that_comes_back_is_mapped_anew(holder: Holder) -> None:
    now = [0.0]
    maps = SegmentMaps(lambda: now[0])
    first = maps.find(holder.endpoint)
    assert first is not None
    holder.lender.close()
    assert maps.find(holder.endpoint, to_write=True) is None
    again = Lender(holder.lent)  # same port, another life
    assert maps.find(holder.endpoint, to_write=True) is None  # not asked again so soon
    now[0] = 60.0
    second = maps.find(holder.endpoint, to_write=True)
    assert second is not None and second is not first
    again.close()
    maps.close()


@pytest.mark.parametrize("endpoint", ["192.0.2.77:1", "127.0.0.1:1", "nowhere", "", "[::1]:5"])
def test_who_lends_nothing_here(maps: SegmentMaps, endpoint: str) -> None:
    assert maps.find(endpoint) is None and maps.find(endpoint) is None


@pytest.mark.parametrize("answer", [b"", b"short", b"not the magic...........", b"TDKVSEG1" + bytes(16)])
def test_a_stranger_on_the_socket(answer: bytes) -> None:
    """Bytes that are no offer, or an offer without a descriptor."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as server:
        port = tcp.getsockname()[1]
        server.bind(lender_name(port))
        server.listen()

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert connect_to_lender(f"127.0.0.1:{port}") is None
        thread.join()


def test_a_port_that_another_lender_of_the_host_has(holder: Holder, maps: SegmentMaps) -> None:
    """Two addresses of one host, the same port: the second lends nothing, the first is not disturbed."""
    second = Lender(holder.lent)
    second.close()
    assert maps.find(holder.endpoint) is not None


def test_memory_that_nobody_mapped() -> None:
    with pytest.raises(OSError, match="has not mapped"):
        LentMemory(4096).find_mapping()


def test_after_close_nothing_is_found(holder: Holder) -> None:
    maps = SegmentMaps()
    segment = maps.find(holder.endpoint)
    assert segment is not None
    value = segment.value(holder.place(0))
    maps.close()
    assert maps.find(holder.endpoint) is None
    assert value is not None and bytes(value) == bytes(64)  # still safe to touch


def test_populating_brings_the_pages_in_and_stops() -> None:
    memory = mmap.mmap(-1, 4 << 20)
    stop = threading.Event()
    stop.set()
    worker = threading.Thread(target=populate, args=(address_of(memory), len(memory), stop))
    worker.start()
    wait_until(lambda: not worker.is_alive(), 5, "end of populating")
