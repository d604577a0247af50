"""`trtllm-serve local`: a whole disaggregated cluster on this machine, from the file that the router takes."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import click
import yaml

from kvstore.errors import SettingsError
from kvstore.protocol import split_address
from kvstore.registry import Backend
from kvstore.registry.embedded import EmbeddedValkey, ValkeyFailed
from trtllm_serve.binding import write_report
from trtllm_serve.children import ChildDied, Children
from trtllm_serve.local_plan import Child, Paths, Plan, make_plan

_POLL = 0.1  # seconds between looks at the children
_QUIET, _LONGEST_QUIET = 2.0, 10.0  # seconds of waiting without a line about it
_LOG_LEVELS = ("internal_error", "error", "warning", "info", "verbose", "debug", "trace")


class Interrupted(Exception):
    """By this signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interruption:
    """Signals to end, as a flag: an exception out of a handler could hit the code that ends the children."""

    def __init__(self) -> None:
        self.signums: list[int] = []
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._note)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.signums.append(signum)

    def check(self) -> None:
        if self.signums:
            raise Interrupted(self.signums[0])

    def insists(self) -> bool:
        return len(self.signums) > 1


class NotReadyInTime(Exception):
    """The message names what did not come up."""


class Launcher:
    def __init__(self, plan: Plan, children: Children, interruption: Interruption, start_timeout: float) -> None:
        self._plan = plan
        self._children = children
        self._interruption = interruption
        self._valkey: EmbeddedValkey | None = None
        self._began = time.monotonic()
        self._deadline = self._began + start_timeout

    def bring_up(self, owned: contextlib.ExitStack) -> dict[str, str]:
        """host:port by name, once the router and all workers serve. `owned` gets what is not a child."""
        plan = self._plan
        uri = self._start_registry(owned)
        if plan.needs_master:
            self._start(plan.master())
        router: Child | None = None
        if plan.router_hosts_registry:
            router = self._start(plan.router(uri, {}))
            uri = "http://" + self._addresses([router])["router"]
        workers = [self._start(plan.worker(worker, uri)) for worker in plan.workers]
        if router is None:
            router = self._start(plan.router(uri, {} if plan.registry else self._addresses(workers)))
        addresses = self._addresses([*workers, router])
        self._wait(lambda: [name for name, address in addresses.items() if not _healthy(address)])
        return addresses

    def watch(self) -> None:
        """Until a child dies (ChildDied) or a signal comes (Interrupted)."""
        while True:
            self._look()
            time.sleep(_POLL)

    def _start_registry(self, owned: contextlib.ExitStack) -> str | None:
        address = self._plan.registry
        if address is None or address.backend is not Backend.EMBEDDED:
            return address.url if address else None
        self._valkey = owned.enter_context(EmbeddedValkey(address.port, log_file=self._plan.paths.log("valkey")))
        return self._valkey.uri

    def _start(self, child: Child) -> Child:
        paths = self._plan.paths
        paths.address(child.name).unlink(missing_ok=True)
        if child.config is not None:
            paths.config(child.name).write_text(yaml.safe_dump(dict(child.config), sort_keys=False))
        self._children.start(child.name, child.argv, paths.log(child.name))
        return child

    def _addresses(self, children: list[Child]) -> dict[str, str]:
        files = {child.name: self._plan.paths.address(child.name) for child in children}
        self._wait(lambda: [name for name, file in files.items() if not file.exists()])
        return {name: file.read_text().strip() for name, file in files.items()}

    def _wait(self, missing: Callable[[], list[str]]) -> None:
        """Until `missing()` is empty; says now and then what it is waiting for."""
        pause = _QUIET
        next_line = time.monotonic() + pause
        while names := missing():
            self._look()
            now = time.monotonic()
            if now > self._deadline:
                logs = "\n".join(f"{p.name}, the end of {p.log}:\n{p.last_lines()}" for p in self._named(names))
                raise NotReadyInTime(f"not ready after {now - self._began:.0f} s: {', '.join(names)}\n{logs}")
            if now >= next_line:
                pause = min(2 * pause, _LONGEST_QUIET)
                next_line = now + pause
                _say(f"{now - self._began:3.0f} s  waiting for {', '.join(names)}{self._last_word(names)}")
            time.sleep(_POLL)

    def _look(self) -> None:
        self._interruption.check()
        self._children.check()
        if self._valkey is not None and not self._valkey.running:
            raise ChildDied(f"valkey ended; see {self._plan.paths.log('valkey')}")

    def _named(self, names: list[str]) -> list[Any]:
        return [process for process in self._children.all if process.name in names]

    def _last_word(self, names: list[str]) -> str:
        last = self._named(names[:1])[0].last_lines(1).strip()
        return "" if last == "(empty)" else f": {last[:100]}"


@click.command("local")
@click.option("-c", "--config", "--config_file", "config_file", required=True, type=click.Path(dir_okay=False))
@click.option("--model", help="Model of all workers started here, in place of the file's.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port of the router, in place of the file's; 0: a free one."
)
@click.option(
    "--report_addr", type=click.Path(dir_okay=False), help="Write the router's host:port here once it serves."
)
@click.option("--run_dir", type=click.Path(file_okay=False), help="For logs and generated files; default: temporary.")
@click.option("-t", "--server_start_timeout", default=180.0, show_default=True, help="Seconds until all must serve.")
@click.option(
    "-l", "--log_level", type=click.Choice(_LOG_LEVELS), default="info", show_default=True, help="Of all parts."
)
@click.option("--telemetry/--no-telemetry", default=True, show_default=True, help="Accepted. Nothing is ever sent.")
def local(
    config_file: str,
    model: str | None,
    port: int | None,
    report_addr: str | None,
    run_dir: str | None,
    server_start_timeout: float,
    log_level: str,
    telemetry: bool,
) -> None:
    """Run a whole disaggregated cluster on this machine.

    Takes the file that `disaggregated` takes. Server blocks without `urls` are started here on free ports, and so are
    `cluster_uri: redis://embedded` and a Mooncake pool with `pool: embedded`. All of it ends with this command, and
    this command ends when a part of it dies.
    """
    interruption = Interruption()
    if report_addr is not None:
        Path(report_addr).unlink(missing_ok=True)
    began = time.monotonic()
    with _run_directory(run_dir) as directory:
        plan = _plan(config_file, model, port, Paths(directory), log_level)
        _say(f"logs in {directory}")
        with contextlib.ExitStack() as owned, Children(_say, interruption.insists) as children:
            launcher = Launcher(plan, children, interruption, server_start_timeout)
            try:
                addresses = launcher.bring_up(owned)
                click.echo(_ready_line(addresses, time.monotonic() - began))
                if report_addr is not None:
                    write_report(report_addr, *split_address(addresses["router"]))
                launcher.watch()
            except Interrupted as signalled:
                _say(f"{signalled}: ending the cluster")
                raise SystemExit(128 + signalled.signum) from None
            except (ChildDied, NotReadyInTime, ValkeyFailed) as error:
                _say(f"{error}\nending the cluster")
                raise SystemExit(1) from None
            finally:
                if report_addr is not None:
                    Path(report_addr).unlink(missing_ok=True)  # nobody may dial a cluster that ends


def _plan(config_file: str, model: str | None, port: int | None, paths: Paths, log_level: str) -> Plan:
    from engine.checkpoint import resolve_model
    from router.config import load_config

    overrides = {} if port is None else {"port": port}
    config = load_config(config_file, overrides)
    for warning in config.warnings:
        _say(f"warning: {warning}")
    document = {**yaml.safe_load(Path(config_file).read_text("utf-8")), **overrides}
    cores = len(os.sched_getaffinity(0))
    return make_plan(
        document, config, paths, cores=cores, resolve_model=resolve_model, model=model, log_level=log_level
    )


@contextlib.contextmanager
def _run_directory(wanted: str | None) -> Iterator[Path]:
    """Locked while in use. A temporary one stays when the cluster failed: the logs say why."""
    directory = Path(wanted or tempfile.mkdtemp(prefix="trtllm-local-")).resolve()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError([("--run_dir", f"{directory} is in use by another cluster")]) from None
        failed = False
        try:
            yield directory
        except SystemExit as ending:
            failed = ending.code == 1
            raise
        finally:
            if wanted is None and not failed:
                shutil.rmtree(directory, ignore_errors=True)


def _healthy(address: str) -> bool:
    connection = http.client.HTTPConnection(*split_address(address), timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _ready_line(addresses: Mapping[str, str], seconds: float) -> str:
    def of(role: str) -> str:
        return ",".join(address for name, address in addresses.items() if name.startswith(role + "-")) or "(by urls)"

    return (
        f"ready http://{addresses['router']}  context {of('context')}  generation {of('generation')}  ({seconds:.1f} s)"
    )


def _say(text: str) -> None:
    click.echo(f"local: {text}", err=True)
