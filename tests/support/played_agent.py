"""A store agent that the test plays itself, at the other end of a real link."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile

from mooncake_pool import wire
from mooncake_pool.link import AgentLink
from mooncake_pool.staging import StagingArea


class PlayedAgent:
    """The other end of the socket, and a process that only waits."""

    def __init__(self, slots: int = 8, value_bytes: int = 100) -> None:
        ours, self.sock = socket.socketpair()
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        log = tempfile.TemporaryFile()  # noqa: SIM115 - the link closes it
        self.link = AgentLink(process, ours, StagingArea.create(value_bytes, slots), log)
        self._frames = wire.receive_frames(self.sock)
        self.sock.settimeout(5)

    def next(self) -> wire.ToAgent:
        return wire.to_agent.decode(next(self._frames))

    def send(self, message: wire.FromAgent) -> None:
        self.sock.sendall(wire.frame(message))
        self.link.pump()

    def close(self) -> None:
        self.sock.close()
        self.link.kill()
        assert self.link.process.stdin is not None
        self.link.process.stdin.close()
        self.link.staging.close_fd()
