"""Command `disaggregated`: the router of a cluster."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from router.app import RouterOptions
    from router.config import DisaggConfig

_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace", "internal_error", "verbose")


@click.command("disaggregated")
@click.option(
    "-c",
    "--config",
    "--config_file",
    "config_file",
    type=click.Path(dir_okay=False),
    required=True,
    help="Disaggregated serving YAML.",
)
@click.option(
    "-m",
    "--metadata_server_config_file",
    type=click.Path(dir_okay=False),
    help="Not in this build; use disagg_cluster in the configuration.",
)
@click.option(
    "-t",
    "--server_start_timeout",
    type=click.FloatRange(min=0),
    default=180,
    show_default=True,
    help="Seconds to wait for the listed workers at start.",
)
@click.option(
    "-r",
    "--request_timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=180,
    show_default=True,
    help="Seconds that a request may take, from its arrival to the end of its answer.",
)
@click.option(
    "-l",
    "--log_level",
    type=click.Choice(_LOG_LEVELS, case_sensitive=False),
    default="info",
    show_default=True,
    help="Log level.",
)
@click.option(
    "-s",
    "--schedule_style",
    type=click.Choice(["context_first", "generation_first"]),
    help="Wins over the configuration.",
)
@click.option("--metrics-log-interval", type=int, default=0, help="Deprecated, has no effect.")
@click.option(
    "--telemetry/--no-telemetry",
    default=True,
    show_default=True,
    help="Accepted for compatibility. Nothing is ever sent.",
)
@click.option(
    "--report_addr",
    type=click.Path(dir_okay=False),
    help="File to write host:port to once the router accepts connections. Makes port 0 possible.",
)
def disaggregated(
    config_file: str,
    metadata_server_config_file: str | None,
    server_start_timeout: float,
    request_timeout: float,
    log_level: str,
    schedule_style: str | None,
    metrics_log_interval: int,
    telemetry: bool,
    report_addr: str | None,
) -> None:
    """Run the router of a disaggregated cluster."""
    import logging

    from kvstore.errors import SettingsError
    from router.app import RouterOptions
    from router.config import load_config, require_workers

    if metadata_server_config_file is not None:
        raise SettingsError([("--metadata_server_config_file", "not in this build; use disagg_cluster with redis://")])
    config = load_config(config_file, {} if schedule_style is None else {"schedule_style": schedule_style})
    require_workers(config)
    if config.port == 0 and report_addr is None:
        raise SettingsError([("port", "0 is possible only with --report_addr")])
    _start_logging(log_level)
    for warning in config.warnings:
        logging.getLogger("trtllm_serve").warning("%s: %s", config_file, warning)
    if metrics_log_interval:
        logging.getLogger("trtllm_serve").warning("--metrics-log-interval: deprecated, has no effect")
    options = RouterOptions(
        request_timeout=request_timeout,
        process_id=_process_id(),
        tokenizer_path=_tokenizer_path(config),
        fault_injection=os.environ.get("TRTLLM_DISAGG_FAULT_INJECTION") == "1",
    )
    sys.exit(_run(config, options, report_addr, server_start_timeout))


def _run(config: DisaggConfig, options: RouterOptions, report_addr: str | None, start_timeout: float) -> int:
    import asyncio
    import logging

    import uvloop

    from kvstore.errors import SettingsError
    from kvstore.protocol import join_address
    from router.app import Router
    from router.server import serve
    from trtllm_serve.binding import CannotBind, bind, bound_port, write_report

    try:
        listener = bind(config.hostname, config.port)
    except CannotBind as error:
        raise SettingsError([("hostname", str(error))]) from None
    port = bound_port(listener)

    def started() -> None:
        logging.getLogger("trtllm_serve").info("router listens on http://%s", join_address(config.hostname, port))
        if report_addr is not None:
            write_report(report_addr, config.hostname, port)

    async def main() -> int:
        return await serve(Router(config, options), listener, started, start_timeout)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, listener:
        return runner.run(main())


def _process_id() -> int:
    from kvstore.errors import SettingsError
    from router.ids import MAX_PROCESS_ID

    name = "TRTLLM_DISAGG_WORKER_PROCESS_ID"
    text = os.environ.get(name, "0")
    if not text.isdecimal() or int(text) > MAX_PROCESS_ID:
        raise SettingsError([(name, f"must be 0 to {MAX_PROCESS_ID}, got {text!r}")])
    return int(text)


def _tokenizer_path(config: DisaggConfig) -> str | None:
    """Where the router's tokenizer is; None when none is configured."""
    for block in (config.context, config.generation):
        name = block.router.tokenizer_dir or block.router.model_path
        if name is not None:
            return _resolve(name)
    return None


def _resolve(name: str) -> str:
    """A model that is not on this machine costs the policies their prefixes, not the router its start."""
    import logging

    from engine.checkpoint import resolve_model
    from kvstore.errors import SettingsError

    try:
        return resolve_model(name)
    except SettingsError as error:
        logging.getLogger("trtllm_serve").warning("no tokenizer for %s: %s", name, error)
        return name


def _start_logging(level: str) -> None:
    import logging

    names = {"trace": "debug", "verbose": "debug", "internal_error": "critical"}
    logging.basicConfig(
        level=names.get(level.lower(), level.lower()).upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("httpcore").setLevel(logging.WARNING)
