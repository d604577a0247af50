from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.chunked import LAST_CHUNK, ChunkError, ChunkScanner, frame, unframe

payloads = st.lists(st.binary(min_size=1, max_size=60), min_size=0, max_size=8)


@given(payloads=payloads, cuts=st.lists(st.integers(0, 600), max_size=12), trailer=st.sampled_from([b"", b"A: b\r\n"]))
def test_any_cut_gives_the_same_whole_chunks(payloads: list[bytes], cuts: list[int], trailer: bytes) -> None:
    wire = b"".join(map(frame, payloads)) + b"0\r\n" + trailer + b"\r\n"
    scanner, out = ChunkScanner(), []
    places = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    for start, end in itertools.pairwise(places):
        assert not scanner.finished
        piece = scanner.feed(wire[start:end])
        if piece:
            unframe(piece)
        out.append(piece)
    assert scanner.finished and not scanner.excess and scanner.chunks == len(payloads)
    assert unframe(b"".join(out)) == b"".join(payloads)


def test_bytes_after_the_end_are_noted() -> None:
    scanner = ChunkScanner()
    scanner.feed(frame(b"x") + LAST_CHUNK + b"HTTP/1.1")
    assert scanner.finished and scanner.excess


def test_a_large_chunk_in_many_pieces_is_joined_once() -> None:
    scanner, wire = ChunkScanner(), frame(b"x" * 1_000_000)
    pieces = [scanner.feed(wire[start : start + 1000]) for start in range(0, len(wire), 1000)]
    assert [len(piece) for piece in pieces if piece] == [len(wire)]


@pytest.mark.parametrize(
    "wire", [b"zz\r\n", b"\r\n\r\n", b"-1\r\n", b"5\r\nabcdeXY", b"1" * 3000, b"0\r\n" + b"t" * 3000]
)
def test_broken_framing(wire: bytes) -> None:
    with pytest.raises(ChunkError):
        ChunkScanner().feed(wire)
