"""Owns a `mooncake_master` process: starts it, proves that it is the one that answers, publishes it, ends it.

    check options, binary, ports ─► start ─► ready? ─► publish manifests ─► watch ─► withdraw ─► end the process group

A master that somebody else runs on the port is never adopted, and no way out leaves the child behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import msgspec

from kvstore.protocol import join_address
from mooncake_pool import net
from mooncake_pool.manifest import LAST_MANIFEST_NAME, MANIFEST_NAME, Manifest, encode_manifest, write_atomically
from mooncake_pool.samples import SampleLog

LOG_NAME = "mooncake_master.log"
LOG_LINES_QUOTED = 20
PROGRESS_SECONDS = 5.0
END_SECONDS = 10.0
LEASE_MILLISECONDS = 5000
SAMPLE_SECONDS = 30.0
"""Longest time between two samples of the master's own account."""
PORT_TRIES = 5
_PR_SET_PDEATHSIG = 1


class MasterError(Exception):
    """The master could not be had or ended; the message is for the operator."""


class MasterOptions(msgspec.Struct, frozen=True):
    rpc_port: int = 50051  # 0: a free one
    metrics_port: int = 9004  # 0: a free one
    eviction_ratio: float = 0.05
    pool_file: str | None = None
    protocol: str = "rdma"
    metadata_server: str = "P2PHANDSHAKE"
    namespace: str = "trtllm"
    run_dir: str | None = None  # None: a temporary directory
    binary: str = "mooncake_master"
    timeout: float = 60.0  # seconds for the master to become ready
    heartbeat_seconds: float = 300.0  # between liveness lines; 0: none


class Interruption:
    """SIGINT and SIGTERM as an event that the owner's waits look at."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._event = threading.Event()

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = self.signum or signum
        self._event.set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    interruption = Interruption()
    previous = {number: signal.signal(number, interruption) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruption
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def own_master(options: MasterOptions, say: Callable[[str], None]) -> int:
    """Runs the pool until a signal comes; 128 + its number. MasterError for every other end. Main thread only.

    `say` gets the lines for the operator.
    """
    binary = find_binary(options.binary)
    with interruptible() as interruption:
        run_dir = _make_run_dir(options.run_dir)
        master = _start_until_ready(options, binary, run_dir, say, interruption)
        try:
            if master is not None:
                _publish_and_watch(options, master, run_dir, say, interruption)
        finally:
            if master is not None:
                master.end()
        assert interruption.signum is not None
        return 128 + interruption.signum


def find_binary(name: str) -> str:
    """Path of the executable, on PATH or beside this interpreter (a venv that is not activated)."""
    beside = os.path.dirname(sys.executable)
    found = shutil.which(name) or shutil.which(name, path=beside)
    if found is None:
        raise MasterError(
            f"{name!r} is not an executable on PATH. It ships with the Mooncake wheel: install the extra `cpu` "
            "(GPU hosts: `cu12` or `cu13`) and `apt-get install libibverbs1` (Debian, Ubuntu); or give --binary a path"
        )
    return found


def _make_run_dir(run_dir: str | None) -> Path:
    if run_dir is None:
        return Path(tempfile.mkdtemp(prefix="trtllm-mooncake-master-"))
    path = Path(run_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MasterError(f"--run_dir {run_dir}: {error}") from None
    return path


class MasterProcess:
    """One child in its own process group, with the ports that it was told to listen on."""

    def __init__(self, binary: str, rpc_port: int, metrics_port: int, eviction_ratio: float, log_path: Path) -> None:
        self.rpc_port = rpc_port
        self.metrics_port = metrics_port
        self.log_path = log_path
        command = [
            binary,
            f"--rpc_port={rpc_port}",
            f"--metrics_port={metrics_port}",
            f"--eviction_ratio={eviction_ratio}",
            "--metrics_host=127.0.0.1",  # its HTTP side has no authentication and can empty the pool
            "--logtostderr=1",
            # A put in place holds a lease on what it has just stored; under the vendor's 10 s a burst fills the pool
            # with blocks that nothing may evict. Longer than any read here may take.
            f"--default_kv_lease_ttl={LEASE_MILLISECONDS}",
            # The lines from which placement is rebuilt. glog spells its variables in lower case.
            f"--vmodule={os.environ.get('GLOG_vmodule', 'allocator=1')}",  # noqa: SIM112
            f"--v={os.environ.get('GLOG_v', '0')}",  # noqa: SIM112
        ]
        with open(log_path, "ab") as log:
            self._log_start = log.tell()
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=_die_with_parent(os.getpid()),
            )

    def exit_code(self) -> int | None:
        return self.child.poll()

    def log_tail(self) -> str:
        """The last lines that this process printed."""
        with open(self.log_path, "rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 65536))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-LOG_LINES_QUOTED:]) or "  (nothing was logged)"

    def is_ready(self) -> bool:
        """True when the master serves and the sockets that answer belong to our child."""
        url = f"http://127.0.0.1:{self.metrics_port}/health"
        try:
            with urllib.request.urlopen(url, timeout=1.0) as answer:
                ready = bool(json.load(answer).get("service_ready"))
        except (OSError, ValueError, AttributeError):
            return False
        return ready and self.owns_ports()

    def owns_ports(self) -> bool:
        return all(net.group_listens_on(self.child.pid, port) for port in (self.rpc_port, self.metrics_port))

    def end(self) -> None:
        """SIGTERM to the process group, SIGKILL to what is left of it after a while. Safe to call twice."""
        if self.child.poll() is None:
            _signal_group(self.child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(END_SECONDS)
        _signal_group(self.child.pid, signal.SIGKILL)
        self.child.wait()


def _signal_group(pgid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def _die_with_parent(parent: int) -> Callable[[], None]:
    """For the child between fork and exec: SIGKILL when the wrapper's main thread ends, however it ends."""
    libc = ctypes.CDLL(None)

    def arrange() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return arrange


def _start_until_ready(
    options: MasterOptions, binary: str, run_dir: Path, say: Callable[[str], None], interruption: Interruption
) -> MasterProcess | None:
    """A master that serves; None when a signal came first. Free ports that are lost in the meantime are chosen anew."""
    deadline = time.monotonic() + options.timeout
    for attempt in range(PORT_TRIES):
        rpc_port, metrics_port = _choose_ports(options)
        try:
            master = MasterProcess(binary, rpc_port, metrics_port, options.eviction_ratio, run_dir / LOG_NAME)
        except OSError as error:
            raise MasterError(f"{binary} could not be started: {error}") from None
        try:
            if _await_ready(master, deadline, options.timeout, say, interruption):
                return master
        except MasterError:
            master.end()
            lost = not (net.port_is_free(rpc_port) and net.port_is_free(metrics_port))
            if not lost or attempt == PORT_TRIES - 1 or 0 not in (options.rpc_port, options.metrics_port):
                raise
            say(f"port {rpc_port} or {metrics_port} was taken meanwhile; trying others")
        except BaseException:
            master.end()
            raise
        else:
            master.end()
            return None
    raise AssertionError("the last try raises")


def _choose_ports(options: MasterOptions) -> tuple[int, int]:
    spare_rpc, spare_metrics = net.free_ports(2)
    for name, port in (("rpc_port", options.rpc_port), ("metrics_port", options.metrics_port)):
        if port and not net.port_is_free(port):
            raise MasterError(f"--{name} {port} is already in use on this host; name another, or 0 for a free one")
    return options.rpc_port or spare_rpc, options.metrics_port or spare_metrics


def _await_ready(
    master: MasterProcess, deadline: float, timeout: float, say: Callable[[str], None], interruption: Interruption
) -> bool:
    """True when it serves, False when a signal came. MasterError when it exits or time runs out."""
    begun = spoken = time.monotonic()
    while True:
        code = master.exit_code()
        if code is not None:
            raise MasterError(_exited_early(code, master))
        if master.is_ready():
            return True
        now = time.monotonic()
        if now >= deadline:
            raise MasterError(
                f"mooncake_master did not serve on port {master.rpc_port} within {timeout:g} s. "
                f"End of {master.log_path}:\n{master.log_tail()}"
            )
        if now - spoken >= PROGRESS_SECONDS:
            spoken = now
            say(f"waiting for mooncake_master on port {master.rpc_port}: {now - begun:.0f} s of {timeout:g} s")
        if interruption.wait(min(0.05, deadline - now)):
            return False


def _exited_early(code: int, master: MasterProcess) -> str:
    tail = master.log_tail()
    hint = "\nA system library is missing: apt-get install libibverbs1" if "libibverbs" in tail else ""
    return f"mooncake_master exited with code {code}. End of {master.log_path}:\n{tail}{hint}"


def _publish_and_watch(
    options: MasterOptions,
    master: MasterProcess,
    run_dir: Path,
    say: Callable[[str], None],
    interruption: Interruption,
) -> None:
    manifest = Manifest(
        master_server_address=join_address(net.routed_address(), master.rpc_port),
        metadata_server=options.metadata_server,
        protocol=options.protocol,
        namespace=options.namespace,
        metrics_port=master.metrics_port,
        eviction_ratio=options.eviction_ratio,
        extra={"master_pid": master.child.pid, "started": time.time()},
    )
    with _published(manifest, run_dir, options.pool_file):
        say(
            f"mooncake_master serves at {manifest.master_server_address}; log {master.log_path}; "
            f"metrics http://127.0.0.1:{master.metrics_port}/metrics"
        )
        _watch(master, options.heartbeat_seconds, SampleLog(run_dir, master.metrics_port), say, interruption)


@contextlib.contextmanager
def _published(manifest: Manifest, run_dir: Path, pool_file: str | None) -> Iterator[None]:
    """Manifests are there inside and gone after, except run_dir/pool.last.json for the report."""
    text = encode_manifest(manifest)
    paths = [run_dir / MANIFEST_NAME] + ([Path(pool_file)] if pool_file else [])
    try:
        for path in (run_dir / LAST_MANIFEST_NAME, *paths):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, text)
            except OSError as error:
                raise MasterError(f"the pool manifest could not be written: {error}") from None
        yield
    finally:
        for path in paths:
            _withdraw(path, text)


def _withdraw(path: Path, text: str) -> None:
    """Removes the file unless another master has published itself there since."""
    with contextlib.suppress(OSError):
        if path.read_text() == text:
            path.unlink()


def _watch(
    master: MasterProcess,
    heartbeat_seconds: float,
    samples: SampleLog,
    say: Callable[[str], None],
    interruption: Interruption,
) -> None:
    """Returns on a signal, after a last sample; MasterError when the child ends by itself."""
    begun = time.monotonic()
    next_line = begun + heartbeat_seconds
    sample_seconds = min(heartbeat_seconds or SAMPLE_SECONDS, SAMPLE_SECONDS)
    next_sample = begun
    while not interruption.wait(0.2):
        code = master.exit_code()
        if code is not None:
            raise MasterError(f"mooncake_master exited with code {code}. See {master.log_path}")
        now = time.monotonic()
        if now >= next_sample:
            next_sample = now + sample_seconds
            samples.take()
        if heartbeat_seconds and now >= next_line:
            next_line += heartbeat_seconds
            say(f"mooncake_master alive after {_duration(now - begun)}")
    samples.take()
    if samples.trouble is not None:
        say(f"some samples for the report are missing: {samples.trouble}")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 60 else f"{seconds / 60:.0f}m"
