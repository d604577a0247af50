"""Messages between an engine's pool client and its agent process, over a socketpair.

Frame: 4 bytes length (little endian), then msgpack. The first frame goes to the agent and is an Open; the agent
answers Ready or Failed. Block bytes never travel here: they lie in slots of the shared staging area.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec

from mooncake_pool.client import StoreSettings

_LENGTH = struct.Struct("<I")
MAX_FRAME = 16 * 1024 * 1024


class Open(msgspec.Struct, tag=True):
    store: StoreSettings
    prefix: str  # key text = prefix + "/" + key in hex
    staging_fd: int  # inherited memfd
    slot_bytes: int  # distance of two slots
    value_bytes: int  # block and trailer
    slots: int
    run_dir: str | None
    rank: int
    role: str
    model_key: str
    incarnation: str
    metrics_port: int  # of the master


class Contains(msgspec.Struct, tag=True):
    call: int
    keys: list[bytes]
    before_put: bool = False  # asked on the write lane


class Get(msgspec.Struct, tag=True):
    call: int
    keys: list[bytes]
    slots: list[int]


class Put(msgspec.Struct, tag=True):
    call: int
    keys: list[bytes]
    slots: list[int]


class State(msgspec.Struct, tag=True):
    """Answered by the agent's main thread, whatever its lanes are doing."""

    call: int


class Close(msgspec.Struct, tag=True):
    pass


class Ready(msgspec.Struct, tag=True):
    segment_name: str
    record: str | None  # path of the segment record


class Failed(msgspec.Struct, tag=True):
    reason: str


class Reply(msgspec.Struct, tag=True):
    """To Contains, Get and Put: an Outcome for each key; to Get also the bytes received for each."""

    call: int
    outcomes: list[int]
    lengths: list[int] = []


class StateReply(msgspec.Struct, tag=True):
    call: int
    master_answers: bool


ToAgent = Open | Contains | Get | Put | State | Close
FromAgent = Ready | Failed | Reply | StateReply
to_agent = msgspec.msgpack.Decoder(ToAgent)
from_agent = msgspec.msgpack.Decoder(FromAgent)
_encoder = msgspec.msgpack.Encoder()


def frame(message: ToAgent | FromAgent) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts received bytes into message bodies."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if length > MAX_FRAME:
                raise ValueError(f"frame of {length} bytes: at most {MAX_FRAME}")
            end = _LENGTH.size + length
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_LENGTH.size : end])
            del self._pending[:end]
            yield body


def receive_frames(sock: socket.socket) -> Iterator[bytes]:
    """Message bodies until the other side closes. Blocks."""
    reader = FrameReader()
    while data := sock.recv(65536):
        yield from reader.feed(data)
