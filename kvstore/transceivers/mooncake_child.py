"""A process around Mooncake's TransferEngine: `python -m kvstore.transceivers.mooncake_child`.

The library may abort its process, cannot be told to give up, and must not be forked around; here none of that reaches
an engine. The process maps the engine's block pool, so that bytes still go from pool to pool. Killing it is how a read
is given up: nothing of it is left that could write.

Control socket: length-prefixed msgpack frames. First from here: {"agent": "host:port", "base": address} or
{"error": text}. Then requests {"agent", "base", "scratch", "pieces"}, each answered by {"code": 0 or negative}.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import socket
import struct
import sys
from typing import Any

import msgspec

_LENGTH = struct.Struct("<I")


class ReadRequest(msgspec.Struct):
    agent: str  # whose memory
    base: int  # of it
    scratch: bool  # into the scratch buffer rather than the pool
    pieces: list[tuple[int, int, int]]  # (offset here, offset there, bytes)


def send_frame(connection: socket.socket, message: Any) -> None:
    payload = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_frame(connection: socket.socket) -> bytes | None:
    """None at the end of the connection."""
    header = _exactly(connection, _LENGTH.size)
    return None if header is None else _exactly(connection, _LENGTH.unpack(header)[0])


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            return None
        received += part
    return bytes(received)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("fd", "scratch_fd", "control"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--host", required=True)
    arguments = parser.parse_args()
    control = socket.socket(fileno=arguments.control)
    try:
        pool, scratch = _map(arguments.fd), _map(arguments.scratch_fd)
        engine = _engine(arguments.host, pool, scratch)
    except (ImportError, OSError, RuntimeError) as error:
        send_frame(control, {"error": f"{type(error).__name__}: {error}"})
        return
    send_frame(control, {"agent": f"{arguments.host}:{engine.get_rpc_port()}", "base": pool[0]})
    while (payload := receive_frame(control)) is not None:
        request = msgspec.msgpack.decode(payload, type=ReadRequest)
        base = (scratch if request.scratch else pool)[0]
        here = [base + local for local, _, _ in request.pieces]
        there = [request.base + remote for _, remote, _ in request.pieces]
        sizes = [size for _, _, size in request.pieces]
        send_frame(control, {"code": engine.batch_transfer_sync_read(request.agent, here, there, sizes)})


def _map(fd: int) -> tuple[int, int]:
    """(address, size). The mapping lives as long as the process."""
    size = os.fstat(fd).st_size
    mapping = mmap.mmap(fd, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    _KEPT.append(mapping)
    return address, size


_KEPT: list[mmap.mmap] = []


def _engine(host: str, *regions: tuple[int, int]) -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if (code := engine.initialize(host, "P2PHANDSHAKE", "tcp", "")) != 0:
        raise RuntimeError(f"TransferEngine.initialize: {code}")
    for address, size in regions:
        if (code := engine.register_memory(address, size)) != 0:
            raise RuntimeError(f"TransferEngine.register_memory: {code}")
    return engine


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of the library are still running
