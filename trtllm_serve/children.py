"""Processes of this project, owned by one launcher: watched, never restarted, ended with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.child_guard import guarded

_POLL = 0.05  # seconds


class ChildDied(Exception):
    """The message names the child, its status, and the end of its log."""


class Process:
    """`argv` in a session of its own, with its output in `log`. Should this process be killed, the kernel kills it."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                guarded(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the launcher, which ends its children in order
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {}),
            )

    def __repr__(self) -> str:
        return f"<Process {self.name} pid={self.pid} {'running' if self.running else 'ended'}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        """Without reaping: as long as the pid is not free for others, its process group can be signalled."""
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def check(self) -> None:
        """ChildDied unless it runs."""
        if not self.running:
            code = self.end()
            status = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            raise ChildDied(f"{self.name} ended with {status}; the end of {self.log}:\n{self.last_lines()}")

    def terminate(self) -> None:
        if self.running:
            self._process.terminate()

    def end(self) -> int:
        """Kills what is left of it and of its process group. The exit status, negative for a signal. Idempotent."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()

    def last_lines(self, count: int = 15) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join("    " + line for line in lines[-count:]) or "    (empty)"


class Children:
    """The processes of one launcher by order of start. Context manager: all are ended at the end."""

    def __init__(self, say: Callable[[str], None], hurry: Callable[[], bool] = lambda: False) -> None:
        """`hurry`: asked while ending; True cuts all waiting short."""
        self.all: list[Process] = []
        self._say = say
        self._hurry = hurry

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def start(self, name: str, words: Sequence[str], log: Path) -> Process:
        """`trtllm-serve WORDS…`."""
        process = Process(name, [sys.executable, "-m", "trtllm_serve", *words], log)
        self.all.append(process)
        return process

    def check(self) -> None:
        for process in self.all:
            process.check()

    def end(self, timeout: float = 15.0) -> None:
        """Router first, so that no request meets a worker that leaves; then workers; then what they depend on.
        Within `timeout` seconds a stage, each is killed that did not end by itself."""
        for stage in (_is_router, _is_worker, lambda process: True):
            chosen = [process for process in self.all if stage(process)]
            self.all = [process for process in self.all if not stage(process)]
            for process in chosen:
                process.terminate()
            deadline = time.monotonic() + timeout
            while any(p.running for p in chosen) and time.monotonic() < deadline and not self._hurry():
                time.sleep(_POLL)
            for process in chosen:
                if process.running:
                    self._say(f"{process.name} did not end when asked to and is killed")
                process.end()


def _is_router(process: Process) -> bool:
    return process.name == "router"


def _is_worker(process: Process) -> bool:
    return process.name.startswith(("context-", "generation-"))
