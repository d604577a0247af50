"""A process that holds blocks and can be read by one transceiver. `python transfer_peer.py NAME NUM_BLOCKS SIZE`.

Prints a handle, then obeys lines: "bump N" gives block N another owner, "quiet" ends its offers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from engine.config import EngineConfig
from engine.ways import open_ways
from kvstore.handoff import HANDLE_VERSION, Handle, StartState
from kvstore.transceivers.shm import SharedPool

ROOT = Path(__file__).resolve().parent.parent.parent


def fill(pages: SharedPool) -> None:
    """Block i is full of i + 1."""
    for block in range(pages.num_blocks):
        pages.bump(block)
        pages.block(block)[:] = bytes([block % 250 + 1]) * pages.block_bytes


def main() -> None:
    name, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    incarnation = secrets.token_hex(8)
    pages = SharedPool.create(count, size, incarnation)
    fill(pages)
    config = EngineConfig("m", transfers=(name,), transfers_required=True, endpoint="127.0.0.1:1")
    [way] = open_ways(config, pages, incarnation).transceivers.values()
    way.holding(True)
    remote = way.descriptor()
    handle = Handle(
        version=HANDLE_VERSION,
        handoff_id=1,
        incarnation=incarnation,
        fingerprint="f",
        endpoint="",
        prompt_tokens=1,
        block_ids=list(range(count)),
        generations=[1] * count,
        starts=[StartState(0, 1, 1)],
        shared_memory=pages.descriptor(),
        remotes={} if remote is None else {name: remote},
    )
    print(handle.encode(), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["bump", block]:
                pages.bump(int(block))
            case ["quiet"]:
                way.holding(False)
        print("ok", flush=True)
    way.close()
    os._exit(0)


class Peer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        line = process.stdout.readline()
        assert line, "the peer did not start"
        self.handle = Handle.decode(line.strip())

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ok\n"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def peer(name: str, num_blocks: int, size: int, **environment: str) -> Iterator[Peer]:
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "mooncake", ROOT / "tests" / "support"))
    process = subprocess.Popen(
        [sys.executable, __file__, name, str(num_blocks), str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths} | environment,
    )
    try:
        yield Peer(process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


if __name__ == "__main__":
    main()
