"""`trtllm-serve serve MODEL`: one OpenAI-compatible worker, on its own or as a part of a disaggregated cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from trtllm_serve.settings import WorkerSettings

Command = TypeVar("Command", bound=Callable[..., Any])

EXIT_STARTUP = 3

LOG_LEVELS = {
    "internal_error": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.INFO,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}

_SERVER = ("host", "port", "server_role", "served_model_name", "tokenizer", "chat_template", "report_addr", "log_level")
"""Flags of the server itself. All others are settings, which a file and --set can have too."""

_ROLES = click.Choice(["context", "generation"], case_sensitive=False)


def _no_effect(*names: str, **options: Any) -> Callable[[Command], Command]:
    return click.option(*names, help="Accepted for compatibility; no effect in this build.", **options)


@click.command(context_settings={"max_content_width": 110})
@click.argument("model")
@click.option("--host", help="Address to listen on.  [default: localhost]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 picks a free one.  [default: 8000]")
@click.option("--config", "--extra_llm_api_options", help="YAML file with settings; flags and --set go before it.")
@click.option("--set", "assignments", multiple=True, metavar="PATH=VALUE", help="One setting, dots for nesting, YAML.")
@click.option("--server_role", type=_ROLES, help="Part of a disaggregated cluster.  [default: serves all by itself]")
@click.option("--disagg_cluster_uri", help="Registry of the cluster: redis://host:port/db or http://router:port.")
@click.option("--served_model_name", help="Name of the model in the API.  [default: MODEL]")
@click.option("--report_addr", help="File to write host:port into once the socket is bound.")
@click.option("--tokenizer", help="Model whose tokenizer and chat template are used.  [default: MODEL]")
@click.option("--chat_template", help="Jinja chat template, or a file that holds one.  [default: the model's]")
@click.option("--reasoning_parser", help="Tells reasoning from answers in chats: deepseek-r1 or qwen3.  [default: off]")
@click.option("--max_batch_size", type=int, help="Requests in one engine step.")
@click.option("--max_num_tokens", type=int, help="Tokens in one engine step.")
@click.option("--max_seq_len", type=int, help="Tokens of prompt and answer together.  [default: the model's]")
@click.option(
    "--free_gpu_memory_fraction",
    "--kv_cache_free_gpu_memory_fraction",
    type=float,
    help="Part of the free device memory that becomes KV cache.",
)
@click.option("--kv_cache_dtype", help="auto, or fp8 on a GPU.")
@click.option("--cpu_threads", type=int, help="Threads of the engine on a CPU; 0 = all cores.")
@click.option("--tensor_parallel_size", "--tp_size", type=int, help="Ranks that share the model. [default: 1]")
@click.option("--pipeline_parallel_size", "--pp_size", type=int, help="Only 1.")
@click.option("--context_parallel_size", "--cp_size", type=int, help="Only 1.")
@click.option("--moe_expert_parallel_size", "--ep_size", type=int, help="Only 1.")
@click.option("--max_beam_width", type=int, help="Only 1.")
@click.option("--backend", type=click.Choice(["pytorch", "mock"]), help="mock: scripted tokens.  [default: pytorch]")
@click.option("--custom_module_dirs", multiple=True, help="Directory with Python modules to import; repeatable.")
@click.option("--log_level", type=click.Choice(list(LOG_LEVELS)), help="[default: info]")
@click.option("--telemetry/--no-telemetry", default=None, help="No effect: nothing is ever sent.")
@_no_effect("--trust_remote_code", is_flag=True, default=None)
@_no_effect("--hf_revision", "--revision")
@_no_effect("--gpus_per_node", type=int)
@_no_effect("--num_postprocess_workers", type=int)
@_no_effect("--enable_chunked_prefill", is_flag=True, default=None)
@_no_effect("--enable_attention_dp", is_flag=True, default=None)
@_no_effect("--otlp_traces_endpoint")
@click.pass_context
def serve(context: click.Context, /, model: str, **_: Any) -> None:
    """Run an OpenAI-compatible server for MODEL: a directory, a .gguf file, a hub id, or "tiny"."""
    context.exit(_run(model, _given(context)))


def _given(context: click.Context) -> dict[str, Any]:
    """Options that somebody set, whatever their value."""
    defaults = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    return {
        name: value
        for name, value in context.params.items()
        if name != "model" and context.get_parameter_source(name) not in defaults
    }


def _run(model: str, given: dict[str, Any]) -> int:
    """Exit code of the server. SettingsError goes on to the command group, which prints it."""
    logging.basicConfig(
        level=LOG_LEVELS[given.get("log_level") or "info"],
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        force=True,
    )
    for chatty in ("httpx", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return _serve_until_end(_settings(model, given))


def _settings(model: str, given: dict[str, Any]) -> WorkerSettings:
    from trtllm_serve.settings import ServerFlags, load_settings

    server = ServerFlags(**{name: given.pop(name) for name in _SERVER if name in given})
    given.pop("telemetry", None)
    if "kv_cache_dtype" in given:
        given["kv_cache_config.dtype"] = given.pop("kv_cache_dtype")
    return load_settings(
        model,
        config=given.pop("config", None),
        assignments=given.pop("assignments", ()),
        cluster_uri=given.pop("disagg_cluster_uri", None),
        flags=given,
        server=server,
        environment=os.environ,
    )


def _serve_until_end(settings: WorkerSettings) -> int:
    import asyncio

    import uvloop

    from kvstore.errors import ServingError
    from trtllm_serve.binding import CannotBind, bind
    from trtllm_serve.worker_server import WorkerServer

    logger = logging.getLogger("trtllm_serve")
    for note in settings.notes:
        logger.info("%s", note)
    logger.debug("effective settings: %s", settings)
    try:
        with bind(settings.flags.host, settings.flags.port) as sock:
            sock.set_inheritable(False)

            async def main() -> int:
                return await WorkerServer(settings, sock).run()

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(main())
    except (CannotBind, ServingError) as error:
        click.echo(f"trtllm-serve: cannot start: {error}", err=True)
        return EXIT_STARTUP
