"""Reads by Mooncake's TransferEngine over TCP, peer to peer, with the library in processes of its own.

One process serves the pool to others and lives as long as the engine. Another one reads, and is ended when a read does
not come to its end in time; the next read starts a new one.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from kvstore.child_guard import guarded
from kvstore.errors import TransferError
from kvstore.handoff import Handle, RemoteMemory
from kvstore.transceivers.base import OverCheck
from kvstore.transceivers.mooncake_child import ReadRequest, receive_frame, send_frame
from kvstore.transceivers.remote import MAX_BLOCKS, SCRATCH_SIZE, Piece, Verification, block_pieces, layout_of
from kvstore.transceivers.shm import SharedPool

log = logging.getLogger(__name__)

_START_TIMEOUT = 20.0  # seconds
_LOOK = 0.05  # seconds between two looks whether anybody still wants the read


class MooncakeTransceiver:
    name = "mooncake"
    batch = MAX_BLOCKS

    def __init__(self, pages: SharedPool, incarnation: str, host: str = "") -> None:
        """TransferError when Mooncake cannot be had."""
        if importlib.util.find_spec("mooncake") is None:
            raise TransferError("the Mooncake wheel is not installed (extra cpu, cu12 or cu13)")
        self._pages = pages
        self._incarnation = incarnation
        self._host = host or "127.0.0.1"
        self._turn = threading.Lock()  # one read at a time
        self._server = _Child(pages.fd, self._host)
        self._reader: _Child | None = None
        self._descriptor = RemoteMemory(self._server.agent, self._server.base, pages.num_blocks, pages.block_bytes)

    def descriptor(self) -> RemoteMemory:
        return self._descriptor

    def reaches(self, handle: Handle) -> bool:
        return self.name in handle.remotes and handle.incarnation != self._incarnation

    def holding(self, open_offers: bool) -> None:
        pass

    def fetch(
        self, handle: Handle, ids: Sequence[int], generations: Sequence[int], blocks: Sequence[int], over: OverCheck
    ) -> None:
        remote = handle.remotes[self.name]
        layout = layout_of(remote, self._pages)
        with self._turn:
            if self._reader is None:
                self._reader = _Child(self._pages.fd, self._host)
            try:
                for start in range(0, len(ids), MAX_BLOCKS):
                    part = slice(start, start + MAX_BLOCKS)
                    wanted = ids[part]
                    pieces = block_pieces(layout, wanted, self._pages, blocks[part])
                    self._reader.read(remote, pieces, over)
                    check = Verification(wanted)
                    self._reader.read(remote, check.pieces, over, scratch=True)
                    check.check(self._reader.scratch, handle.incarnation, layout, wanted, generations[part])
            except _ReaderEnded:
                self._reader = None
                raise

    def close(self) -> None:
        self._server.end()
        if self._reader is not None:
            self._reader.end()


class _ReaderEnded(TransferError):
    pass


class _Child:
    """One process of kvstore.transceivers.mooncake_child. TransferError when it does not start."""

    def __init__(self, pool_fd: int, host: str) -> None:
        ours, theirs = socket.socketpair()
        scratch = os.memfd_create("kv-scratch", os.MFD_CLOEXEC)
        os.ftruncate(scratch, SCRATCH_SIZE)
        self._control = ours
        fds = (pool_fd, scratch, theirs.fileno())
        argv = [sys.executable, "-m", "kvstore.transceivers.mooncake_child", "--host", host]
        for name, fd in zip(("fd", "scratch_fd", "control"), fds, strict=True):
            argv += [f"--{name}", str(fd)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            # Its log lines at start-up are false alarms; what matters comes over the control socket.
            self._process = subprocess.Popen(
                guarded(argv), pass_fds=fds, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
            )
            self.scratch = _mapped(scratch)
        finally:
            theirs.close()
            os.close(scratch)
        ours.settimeout(_START_TIMEOUT)
        try:
            payload = receive_frame(ours)
            hello: dict[str, Any] = msgspec.msgpack.decode(payload) if payload else {"error": "it ended while starting"}
        except OSError as error:
            hello = {"error": str(error)}
        if "error" in hello:
            self.end()
            raise TransferError(f"Mooncake does not start: {hello['error']}")
        ours.settimeout(None)
        self.agent: str = hello["agent"]
        self.base: int = hello["base"]

    def read(self, remote: RemoteMemory, pieces: Sequence[Piece], over: OverCheck, scratch: bool = False) -> None:
        """_ReaderEnded when this process is of no more use: nothing of it can write any more then."""
        try:
            send_frame(self._control, ReadRequest(remote.agent, remote.base, scratch, list(pieces)))
            while not select.select([self._control], [], [], _LOOK)[0]:
                if over():
                    self.end()
                    raise _ReaderEnded("the Mooncake read did not end in time")
            payload = receive_frame(self._control)
        except OSError as error:
            self.end()
            raise _ReaderEnded(f"the Mooncake process: {error}") from None
        if payload is None:
            self.end()
            raise _ReaderEnded("the Mooncake process ended during the read")
        code: int = msgspec.msgpack.decode(payload)["code"]
        if code != 0:
            raise TransferError(f"the Mooncake read from {remote.agent} failed with {code}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._control.close()


def _mapped(fd: int) -> memoryview:
    import mmap

    return memoryview(mmap.mmap(fd, SCRATCH_SIZE))
