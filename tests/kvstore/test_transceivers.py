"""Every transceiver against a real process: right bytes, stale pages, killed and paused peers, foreign pools."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from transfer_peer import ROOT, Peer, peer

from engine.config import EngineConfig
from engine.ways import open_ways
from kvstore.errors import SettingsError, StaleBlock, TransferError
from kvstore.handoff import Handle
from kvstore.transceivers import nixl
from kvstore.transceivers.base import Transceiver, Unsettled
from kvstore.transceivers.shm import SharedPool

SIZE = 64 * 1024
COUNT = 40
MODULE = {"nixl": "nixl", "mooncake": "mooncake", "shm": "sys"}
WAYS = ["shm", "nixl", "mooncake"]


class Here:
    def __init__(self, name: str) -> None:
        self.pages = SharedPool.create(COUNT, SIZE, f"here-{name}")
        config = EngineConfig("m", transfers=(name,), transfers_required=True, endpoint="127.0.0.1:1")
        self.way: Transceiver = open_ways(config, self.pages, f"here-{name}").transceivers[name]

    def read(
        self, handle: Handle, ids: list[int], generations: list[int] | None = None, seconds: float = 10.0
    ) -> list[int]:
        """The first byte of each block."""
        deadline = time.monotonic() + seconds
        blocks = list(range(len(ids)))
        for block in blocks:
            self.pages.block(block)[:] = bytes(SIZE)
        self.way.fetch(handle, ids, generations or [1] * len(ids), blocks, lambda: time.monotonic() > deadline)
        values = [self.pages.block(block)[0] for block in blocks]
        assert values == [self.pages.block(block)[-1] for block in blocks]
        return values


@pytest.fixture(scope="module", params=WAYS)
def name(request: pytest.FixtureRequest) -> str:
    if importlib.util.find_spec(MODULE[request.param]) is None:
        pytest.skip(f"{MODULE[request.param]} is not installed")
    return str(request.param)


@pytest.fixture(scope="module")
def here(name: str) -> Iterator[Here]:
    made = Here(name)
    yield made
    made.way.close()


@pytest.fixture(scope="module")
def there(name: str) -> Iterator[Peer]:
    with peer(name, COUNT, SIZE) as made:
        yield made


def test_right_bytes_in_any_order(here: Here, there: Peer) -> None:
    handle = there.handle
    assert here.way.reaches(handle)
    assert here.read(handle, list(range(COUNT))) == list(range(1, COUNT + 1))
    assert here.read(handle, [7]) == [8]
    assert here.read(handle, [39, 3, 4, 5, 0]) == [40, 4, 5, 6, 1]
    results: list[list[int]] = []
    thread = threading.Thread(target=lambda: results.append(here.read(handle, [2])))
    thread.start()
    thread.join()
    assert results == [[3]], "from another thread"


def test_a_new_owner_is_seen(here: Here, there: Peer) -> None:
    there.tell("bump 5")
    with pytest.raises(StaleBlock, match="block 5"):
        here.read(there.handle, [4, 5, 6])
    assert here.read(there.handle, [4, 6]) == [5, 7]
    assert here.read(there.handle, [5], [2]) == [6]


@pytest.mark.parametrize("ids", [[COUNT], [-1], [0, 10**6]])
def test_blocks_that_are_not_there(here: Here, there: Peer, ids: list[int]) -> None:
    with pytest.raises(TransferError):
        here.read(there.handle, ids)
    assert here.read(there.handle, [0]) == [1]


def test_a_killed_peer(name: str, here: Here, there: Peer) -> None:
    if name == "shm":
        pytest.skip("its memory is still here, and so are the generations")
    with peer(name, COUNT, SIZE) as other:
        assert here.read(other.handle, [0]) == [1]
        other.kill()
        begun = time.monotonic()
        for _ in range(2):
            with pytest.raises(TransferError):
                here.read(other.handle, [0, 1])
        assert time.monotonic() - begun < 8
    assert here.read(there.handle, [0, 9]) == [1, 10], "the others are not touched by it"


def test_another_incarnation_at_the_same_place(name: str, here: Here, there: Peer) -> None:
    handle = msgspec.structs.replace(there.handle, incarnation="somebody else")
    with pytest.raises(TransferError):
        here.read(handle, [0])
    assert here.read(there.handle, [0]) == [1]


def test_other_block_sizes_are_refused_with_both_values(name: str, here: Here, there: Peer) -> None:
    if name == "shm":
        pytest.skip("the reader maps the pool and looks at its header: test_shm_pool")
    remote = msgspec.structs.replace(there.handle.remotes[name], block_bytes=SIZE // 2)
    with pytest.raises(TransferError) as error:
        here.read(msgspec.structs.replace(there.handle, remotes={name: remote}), [0])
    assert str(SIZE) in str(error.value) and str(SIZE // 2) in str(error.value)


def test_nobody_wants_it_any_more(name: str, here: Here, there: Peer) -> None:
    """Over at once: nothing, or everything, and never a hang."""
    try:
        here.read(there.handle, [0, 1], seconds=-1)
    except Unsettled as unsettled:
        settled = threading.Event()
        unsettled.then(settled.set)
        assert settled.wait(10)
    except TransferError:
        pass
    assert here.read(there.handle, [0, 1]) == [1, 2]


PAUSED = """
import signal, sys, threading, time
from transfer_peer import peer
from kvstore.transceivers.base import Unsettled
sys.path.insert(0, "tests/kvstore")
from test_transceivers import COUNT, SIZE, Here
here = Here("nixl")
with peer("nixl", COUNT, SIZE) as there:
    here.read(there.handle, [0])
    there.signal(signal.SIGSTOP)
    begun = time.monotonic()
    try:
        here.read(there.handle, list(range(COUNT)), seconds=0.3)
        raise SystemExit("a paused peer has answered")
    except Unsettled as error:
        unsettled = error
    assert time.monotonic() - begun < 2 and here.way.unsettled == 1
    settled = threading.Event()
    unsettled.then(settled.set)
    assert not settled.wait(0.5), "its bytes may still come"
    if sys.argv[1] == "go on":
        there.signal(signal.SIGCONT)
    else:
        there.kill()
    assert settled.wait(20)
    assert here.way.unsettled == 0
    if sys.argv[1] == "go on":
        assert here.read(there.handle, [3]) == [4]
here.way.close()
"""


@pytest.mark.parametrize("then", ["go on", "die"])
def test_a_paused_peer_over_tcp(then: str) -> None:
    """The read cannot be taken back: it stays unsettled until its bytes have come, or the peer is dead."""
    _needs_nixl()
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "mooncake", ROOT / "tests" / "support"))
    environment = os.environ | {"UCX_TLS": "tcp", "PYTHONPATH": paths}
    command = [sys.executable, "-c", PAUSED, then]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr


def test_an_idle_agent_costs_nothing() -> None:
    _needs_nixl()
    with peer("nixl", 4, 4096) as there:
        there.tell("quiet")
        before = _cpu(there.process.pid)
        time.sleep(2.0)
        assert _cpu(there.process.pid) - before < 0.05


def _cpu(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_interface_of_an_address() -> None:
    assert nixl.interface_of("127.0.0.1") == "lo"
    assert nixl.interface_of("") is None and nixl.interface_of("203.0.113.9") is None


# ------------------------------------------------------------------ which ways are opened


def ways(transfers: tuple[str, ...], **more: Any) -> tuple[list[str], str]:
    pages = SharedPool.create(2, 4096, "w")
    opened = open_ways(EngineConfig("m", transfers=transfers, **more), pages, "w")
    for way in opened.transceivers.values():
        way.close()
    return list(opened.transceivers), opened.choice


def test_on_loopback_shared_memory_is_enough() -> None:
    names, choice = ways(("shm", "nixl"), endpoint="127.0.0.1:8000")
    assert names == ["shm"]
    assert choice.startswith("hand-offs by shm; nixl is not started: 127.0.0.1 is reached from this host only")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "available", lambda: "the nixl package is not installed")
    names, choice = ways(("shm", "nixl", "pool"), endpoint="10.0.0.1:8000")
    assert names == ["shm"]
    assert choice == "hand-offs by shm, then pool; no nixl: the nixl package is not installed"
    with pytest.raises(SettingsError, match="nixl package is not installed"):
        ways(("nixl",), transfers_required=True, endpoint="10.0.0.1:8000")


def _needs_nixl() -> None:
    if (reason := nixl.available()) is not None:
        pytest.skip(reason)
