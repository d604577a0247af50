"""Commands `mooncake_master` and `mooncake_pool_report`."""

from __future__ import annotations

import math

import click

_telemetry = click.option(
    "--telemetry/--no-telemetry",
    default=True,
    show_default=True,
    help="Accepted for compatibility. Nothing is ever sent.",
)


def _finite(_context: click.Context, _parameter: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number")
    return value


def _metadata_server(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if value != "P2PHANDSHAKE" and not value.startswith(("http://", "https://", "etcd://")):
        raise click.BadParameter(
            f"{value!r} is not P2PHANDSHAKE, http://... or etcd://... (Mooncake's wheels have no Redis)"
        )
    return value


def _namespace(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if not value or any(character in ",&?\n\r" or character.isspace() for character in value):
        raise click.BadParameter(f"{value!r} is empty, or has a space, ',', '&' or '?', which pool keys cannot have")
    return value


@click.command("mooncake_master")
@click.option(
    "--rpc_port",
    type=click.IntRange(0, 65535),
    default=50051,
    show_default=True,
    help="Port that store clients reach the master on; 0 chooses a free one.",
)
@click.option(
    "--metrics_port",
    type=click.IntRange(0, 65535),
    default=9004,
    show_default=True,
    help="Prometheus port, on 127.0.0.1; 0 chooses a free one.",
)
@click.option(
    "--eviction_ratio",
    type=click.FloatRange(0, 1, min_open=True),
    callback=_finite,
    default=0.05,
    show_default=True,
    help="Fraction of the pool freed per eviction pass.",
)
@click.option(
    "--pool_file",
    type=click.Path(dir_okay=False),
    help="File to publish the pool manifest to once the master serves; servers name it as mooncake_store.pool: "
    "file://<path>. Removed on exit. One is written to --run_dir regardless.",
)
@click.option(
    "--protocol",
    type=click.Choice(["rdma", "tcp"]),
    default="rdma",
    show_default=True,
    help="Transport of every participant, recorded in the manifest.",
)
@click.option(
    "--metadata_server",
    callback=_metadata_server,
    default="P2PHANDSHAKE",
    show_default=True,
    help="Mooncake metadata service, recorded in the manifest. P2PHANDSHAKE needs no further process.",
)
@click.option(
    "--namespace",
    callback=_namespace,
    default="trtllm",
    show_default=True,
    help="Default key namespace of this pool, recorded in the manifest. A server may override it.",
)
@click.option(
    "--run_dir",
    type=click.Path(file_okay=False),
    help="Where to keep the master's log and a copy of the manifest; default: a temporary directory.",
)
@click.option(
    "--binary",
    default="mooncake_master",
    show_default=True,
    help="The master executable, looked up on PATH. It ships with the Mooncake wheel.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    callback=_finite,
    default=60.0,
    show_default=True,
    help="Seconds to wait for the master to serve before giving up on it.",
)
@click.option(
    "--heartbeat_seconds",
    type=click.FloatRange(0),
    callback=_finite,
    default=300.0,
    show_default=True,
    help="Interval between liveness lines; 0 disables them.",
)
@_telemetry
def mooncake_master(telemetry: bool, **options: object) -> None:
    """Own a Mooncake pool for as long as this command runs.

    Start it before the servers that join the pool. They wait for the manifest, so the order within a job is not
    delicate, but nothing can lend memory or be looked up until this runs.
    """
    import msgspec

    from mooncake_pool.master import MasterError, MasterOptions, own_master

    if options["rpc_port"] and options["rpc_port"] == options["metrics_port"]:
        raise click.UsageError(f"--rpc_port and --metrics_port are both {options['rpc_port']}")
    try:
        status = own_master(msgspec.convert(options, MasterOptions), click.echo)
    except MasterError as error:
        raise click.ClickException(str(error)) from None
    click.get_current_context().exit(status)


@click.command("mooncake_pool_report")
@click.option(
    "--run_dir",
    type=click.Path(file_okay=False, exists=True),
    required=True,
    help="Directory with the pool manifest and the segments/ records that each rank wrote.",
)
@click.option(
    "--master_log",
    type=click.Path(dir_okay=False),
    help="The master's log, for the placement table; default: mooncake_master.log in --run_dir.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the same facts as JSON.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False),
    help="Also write a self-contained page with the placement map and occupancy over time.",
)
@_telemetry
def mooncake_pool_report(
    run_dir: str, master_log: str | None, as_json: bool, html: str | None, telemetry: bool
) -> None:
    """Report the capacity that a run's pool had, and where blocks landed.

    Safe while the job runs and after it: the records outlive the processes that wrote them.
    """
    from pathlib import Path

    from mooncake_pool.report import collect, to_json
    from mooncake_pool.report_html import page
    from mooncake_pool.report_text import render

    report = collect(Path(run_dir), Path(master_log) if master_log else None)
    if report.empty:
        raise click.UsageError(
            f"--run_dir {run_dir}: no pool.json, pool.last.json, segments/*.json or mooncake_master.log is there"
        )
    for problem in report.problems:
        click.echo(f"warning: {problem}", err=True)
    if html is not None:
        try:
            Path(html).write_text(page(report), encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"--html {html}: {error.strerror or error}") from None
    click.echo(to_json(report) if as_json else render(report))
