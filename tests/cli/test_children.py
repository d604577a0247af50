"""Owned processes: seen dying, ended in bounded time with all they started, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from registry_helpers import eventually

from kvstore.child_guard import guarded
from trtllm_serve.children import ChildDied, Children, Process

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
DEAF = [
    sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)",
]  # fmt: skip
PARENT = [
    sys.executable, "-c",
    "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "print(p.pid, flush=True); time.sleep(60)",
]  # fmt: skip


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def children(said: list[str]) -> Iterator[Children]:
    with Children(said.append) as children:
        yield children


def add(children: Children, name: str, argv: list[str], tmp_path: Path) -> Process:
    process = Process(name, argv, tmp_path / f"{name}.log")
    children.all.append(process)
    return process


def test_a_process_is_in_a_session_of_its_own_under_its_own_pid(tmp_path: Path, children: Children) -> None:
    process = add(children, "a", SLEEP, tmp_path)
    eventually(lambda: "time.sleep" in " ".join(psutil.Process(process.pid).cmdline()[-1:]))
    assert os.getsid(process.pid) == process.pid
    children.check()
    assert "running" in repr(process)


def test_a_death_is_told_with_status_and_last_lines(tmp_path: Path, children: Children) -> None:
    code = "import sys\nfor i in range(100): print('line', i)\nsys.exit(3)"
    process = add(children, "worker", [sys.executable, "-c", code], tmp_path)
    eventually(lambda: not process.running)
    with pytest.raises(ChildDied) as caught:
        children.check()
    text = str(caught.value)
    assert "worker ended with exit code 3" in text and str(tmp_path / "worker.log") in text
    assert "line 99" in text and "line 80" not in text


def test_a_killed_child_is_told_by_signal(tmp_path: Path, children: Children) -> None:
    process = add(children, "worker", SLEEP, tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: not process.running)
    with pytest.raises(ChildDied, match="signal SIGKILL"):
        children.check()


def test_a_program_that_is_not_there_says_so_in_the_log(tmp_path: Path, children: Children) -> None:
    process = add(children, "worker", ["/no/such/program"], tmp_path)
    eventually(lambda: not process.running)
    with pytest.raises(ChildDied, match="cannot run /no/such/program"):
        process.check()


def test_ending_takes_the_router_first_and_asks_before_it_kills(
    tmp_path: Path, children: Children, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    ask = Process.terminate
    monkeypatch.setattr(Process, "terminate", lambda self: (order.append(self.name), ask(self))[1])
    for name in ("master", "context-0", "generation-0", "router"):
        add(children, name, SLEEP, tmp_path)
    pids = [process.pid for process in children.all]
    children.end()
    assert order == ["router", "context-0", "generation-0", "master"]
    assert all(gone(pid) for pid in pids)
    assert children.all == [] and said == []
    children.end()


def test_a_deaf_child_is_killed_after_the_limit_and_named(tmp_path: Path, children: Children, said: list[str]) -> None:
    process = add(children, "context-0", DEAF, tmp_path)
    eventually(lambda: "deaf" in process.last_lines())
    before = time.monotonic()
    children.end(timeout=0.3)
    assert 0.3 <= time.monotonic() - before < 3
    assert gone(process.pid)
    assert said == ["context-0 did not end when asked to and is killed"]


def test_hurry_cuts_the_wait(tmp_path: Path) -> None:
    children = Children(lambda _text: None, hurry=lambda: True)
    process = add(children, "context-0", DEAF, tmp_path)
    eventually(lambda: "deaf" in process.last_lines())
    before = time.monotonic()
    children.end(timeout=30)
    assert time.monotonic() - before < 3


def test_grandchildren_end_too(tmp_path: Path, children: Children) -> None:
    process = add(children, "context-0", PARENT, tmp_path)
    eventually(lambda: process.last_lines().strip().isdecimal())
    grandchild = int(process.last_lines())
    os.kill(process.pid, signal.SIGKILL)  # it cannot end its own
    eventually(lambda: not process.running)
    assert not gone(grandchild)
    children.end()
    eventually(lambda: gone(grandchild))


def test_a_killed_owner_takes_its_children_along(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from trtllm_serve.children import Process\n"
        f"p = Process('a', [sys.executable, '-c', 'import time; time.sleep(60)'], Path({str(tmp_path / 'a.log')!r}))\n"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        eventually(lambda: "time.sleep" in " ".join(psutil.Process(pid).cmdline()[-1:]))
        owner.kill()
    eventually(lambda: gone(pid), timeout=3)


def test_a_command_whose_owner_is_gone_already_does_not_run(tmp_path: Path) -> None:
    argv = guarded([sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"])
    argv[4] = "1"  # another parent than this process
    result = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    assert result.returncode != 0 and "is gone" in result.stderr
    assert not (tmp_path / "ran").exists()


def test_the_guard_passes_output_status_and_arguments_on() -> None:
    result = subprocess.run(
        guarded([sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "a b", "--c"]),
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (result.returncode, result.stdout) == (7, "['a b', '--c']\n")
