"""The command `trtllm-serve`. A subcommand's module, with what it imports, is loaded when that command is used."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from kvstore.errors import SettingsError

DEFAULT_COMMAND = "serve"
COMMANDS = {
    "serve": ("trtllm_serve.serve:serve", "Run an OpenAI API server for a model, or a context or generation worker."),
    "disaggregated": ("trtllm_serve.disaggregated:disaggregated", "Run the router of a disaggregated cluster."),
    "local": ("trtllm_serve.local:local", "Run a whole disaggregated cluster on this machine."),
    "mooncake_master": ("trtllm_serve.mooncake:mooncake_master", "Own a Mooncake pool for as long as this runs."),
    "mooncake_pool_report": (
        "trtllm_serve.mooncake:mooncake_pool_report",
        "Report the capacity a run's pool had, and where blocks landed.",
    ),
}
_NEEDS_EXTRA = ("torch", "safetensors", "gguf", "mooncake", "nixl")


class LazyGroup(click.Group):
    """A first word that is no command is the argument of `serve`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            _explain_missing(cmd_name, error)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS:
            _hint_at_misspelling(args[0])
            return DEFAULT_COMMAND, self.get_command(ctx, DEFAULT_COMMAND), args
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SettingsError as error:
            for path, message in error.problems:
                click.echo(f"Error: {path}: {message}" if path else f"Error: {message}", err=True)
            ctx.exit(2)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _NEEDS_EXTRA:
                raise
            _explain_missing(ctx.invoked_subcommand or DEFAULT_COMMAND, error)


def _explain_missing(command: str, error: ModuleNotFoundError) -> NoReturn:
    name = (error.name or "").partition(".")[0]
    if name in _NEEDS_EXTRA:
        reason = f"needs the Python package {name}: pip install 'trtllm-disagg[cpu]' (or cu12, cu13)"
    else:
        reason = f"cannot be loaded: {error}"
    raise click.ClickException(f"{command} {reason}") from error


def _hint_at_misspelling(word: str) -> None:
    close = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.8)
    if close and not Path(word).exists():
        click.echo(f"note: no command {word!r}, so it is taken as the MODEL of serve; {close[0]} is one", err=True)


def _version() -> str:
    try:
        return importlib.metadata.version("trtllm-disagg")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"trtllm-serve (trtllm-disagg) {_version()}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
def main() -> None:
    """Serve language models, disaggregated into context and generation workers behind one router.

    `trtllm-serve MODEL …` is short for `trtllm-serve serve MODEL …`.
    """


if __name__ == "__main__":
    sys.exit(main())
