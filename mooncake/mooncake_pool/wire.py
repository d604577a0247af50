"""Messages between an engine's pool client and its agent process, over a socketpair.

Frame: 4 bytes length (little endian), then msgpack. The first frame goes to the agent and is an Open; the agent
answers Ready or Failed. Block bytes never travel here: they lie in slots of the shared staging area.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator

import msgspec

from mooncake_pool.client import Place, StoreSettings
from mooncake_pool.segments import Activity

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
    linger: float = 0.0  # seconds for which the segment outlives an engine that dies


class Contains(msgspec.Struct, tag=True):
    call: int
    keys: list[bytes]
    before_put: bool = False  # asked on the write lane


class Locate(msgspec.Struct, tag=True):
    """Answered with the place of each key that is there."""

    call: int
    keys: list[bytes]


class Reserve(msgspec.Struct, tag=True):
    """Answered with a place to fill for each key that was not there. A Settle must follow."""

    call: int
    keys: list[bytes]


class Settle(msgspec.Struct, tag=True):
    """The places of an earlier Reserve are filled, except those of `unfilled`. Not answered."""

    reservation: int  # its call number
    unfilled: list[bytes]


class Forget(msgspec.Struct, tag=True):
    """Keys whose values are not what they should be. Not answered."""

    keys: list[bytes]


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
    activity: Activity | None = None  # for the segment record


class Close(msgspec.Struct, tag=True):
    pass


class Ready(msgspec.Struct, tag=True):
    segment_name: str
    record: str | None  # path of the segment record


class Failed(msgspec.Struct, tag=True):
    reason: str


class Reply(msgspec.Struct, tag=True):
    """An Outcome for each key; to Get also the bytes received for each, to Locate, Reserve and Put the places."""

    call: int
    outcomes: list[int]
    lengths: list[int] = []
    places: list[Place | None] = []


class StateReply(msgspec.Struct, tag=True):
    call: int
    master_answers: bool


ToAgent = Open | Contains | Locate | Reserve | Settle | Forget | Get | Put | State | Close
MakeMessage = Callable[[int], ToAgent]
"""From the number of the call."""
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
