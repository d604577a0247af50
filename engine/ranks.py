"""Tensor parallelism on one machine, seen from rank 0: starting the other ranks, and handing each step to them.

Rank 0 schedules and samples. The others get a step's chunks over a socket pair, build the same metadata and take part
in the model's collectives; all of them work on one KV pool (kv_pool.py). A rank that dies breaks the collective that
the others are in, and with it the engine.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from engine.channel import Channel
from engine.config import EngineConfig
from engine.step import Chunk
from kvstore.errors import InternalError, SettingsError
from kvstore.transceivers.shm import PoolLayout, SharedPool

if TYPE_CHECKING:
    from engine.gloo import GlooGroup

_END_TIMEOUT = 5.0


class RankStart(msgspec.Struct):
    config: EngineConfig
    rank: int
    store: str  # a path for the ranks to find each other


class PoolAt(msgspec.Struct, tag="pool", array_like=True):
    path: str
    offset: int  # of block 0 in the file
    num_blocks: int


class Steps(msgspec.Struct, tag="step", array_like=True):
    chunks: list[tuple[list[int], int, list[int], bool, bool]]  # the fields of Chunk


class RankReady(msgspec.Struct, tag="ready"):
    pass


class RankFailed(msgspec.Struct, tag="failed"):
    message: str
    problems: list[tuple[str, str]] = []


ToRank = PoolAt | Steps
FromRank = RankReady | RankFailed


class Ranks:
    """The ranks from 1 up, as processes of this one. `close` ends them."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts them and joins their group as rank 0. RuntimeError if one does not come."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        store = os.path.join(self._folder.name, "store")
        try:
            for rank in range(1, config.tp_size):
                self._start(RankStart(config, rank, store))
            self.group = self._join(config, store)
        except BaseException:
            self.close()
            raise

    def _start(self, start: RankStart) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "engine.rank", "--fd", str(theirs.fileno())]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            self._channels.append(Channel(ours))
            self._processes.append(
                subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
            )
        self._channels[-1].send([self._encoder.encode(start)])

    def _join(self, config: EngineConfig, store: str) -> GlooGroup:
        from engine.gloo import GlooGroup
        from engine.parallel import Part

        return GlooGroup(Part(0, config.tp_size), store)

    def wait_ready(self) -> None:
        """Until every rank has its weights. SettingsError or InternalError with the words of one that has not."""
        for rank, channel in enumerate(self._channels, 1):
            payload = channel.receive()
            if payload is None:
                raise InternalError(f"rank {rank} of the engine has ended during start-up")
            answer = msgspec.msgpack.decode(payload, type=FromRank)
            if isinstance(answer, RankFailed):
                if answer.problems:
                    raise SettingsError(answer.problems)
                raise InternalError(f"rank {rank} of the engine: {answer.message}")

    def share_pool(self, pages: SharedPool) -> None:
        offset = PoolLayout(pages.num_blocks, pages.block_bytes).blocks_offset
        self._tell(PoolAt(f"/proc/{os.getpid()}/fd/{pages.fd}", offset, pages.num_blocks))

    def step(self, chunks: Sequence[Chunk]) -> None:
        """The other ranks begin this step; rank 0 is to do so at once."""
        fields = [(c.tokens, c.start, c.block_table, c.wants_logits, c.wants_all) for c in chunks]
        self._tell(Steps(fields))

    def _tell(self, message: ToRank) -> None:
        payload = self._encoder.encode(message)
        for channel in self._channels:
            channel.send([payload])

    def close(self) -> None:
        for channel in self._channels:
            channel.shut()
        for process in self._processes:
            try:
                process.wait(_END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for channel in self._channels:
            channel.close()
        self._folder.cleanup()
