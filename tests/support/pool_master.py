"""A real `trtllm-serve mooncake_master` as a subprocess, for tests of several parts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mooncake_pool.manifest import Manifest, read_manifest

COMMAND = [sys.executable, "-c", "from trtllm_serve.mooncake import mooncake_master as main; main()"]


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Seconds that it took; AssertionError naming `what` when it did not come true."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - begun


class PoolMaster:
    """The command running with its files in `folder`; free ports unless given."""

    def __init__(self, folder: Path, rpc_port: int = 0, metrics_port: int = 0, **options: object) -> None:
        self.run_dir = folder / "run"
        self.pool_file = folder / "pool.json"
        arguments = {
            "protocol": "tcp",
            "rpc_port": rpc_port,
            "metrics_port": metrics_port,
            "run_dir": self.run_dir,
            "pool_file": self.pool_file,
        } | options
        command = COMMAND + [f"--{name}={value}" for name, value in arguments.items()]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    @property
    def reference(self) -> str:
        return f"file://{self.pool_file}"

    def manifest(self, seconds: float = 20.0) -> Manifest:
        """Waits for it to be published."""
        wait_until(lambda: self.pool_file.exists() or self.process.poll() is not None, seconds, "pool manifest")
        assert self.process.poll() is None, self.process.communicate()[0]
        return read_manifest(self.pool_file)

    def kill_master(self) -> None:
        """SIGKILL to the vendor's process; the command then ends by itself."""
        pid = self.manifest().extra["master_pid"]
        os.kill(pid, signal.SIGKILL)
        self.finish()

    def finish(self, seconds: float = 15.0) -> tuple[int, str]:
        """Exit code and output of a command that ends by itself."""
        output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, output

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.finish()


@contextlib.contextmanager
def pool_master(folder: Path, rpc_port: int = 0, metrics_port: int = 0, **options: object) -> Iterator[PoolMaster]:
    """Serving inside, ended after."""
    master = PoolMaster(folder, rpc_port, metrics_port, **options)
    try:
        master.manifest()
        yield master
    finally:
        master.stop()
