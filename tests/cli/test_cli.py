"""The command line as a user meets it: lazy, with clear errors."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvstore.errors import SettingsError
from trtllm_serve import cli

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*words: str, timeout: float = 50) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "trtllm_serve", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def test_help_is_quick_and_lists_all_commands() -> None:
    started = time.monotonic()
    result = run("--help")
    assert result.returncode == 0
    assert time.monotonic() - started < 5  # 0.1 s on an idle machine; an import of torch alone takes longer than this
    for name, (_, help_text) in cli.COMMANDS.items():
        assert name in result.stdout
        assert help_text.split()[0] in result.stdout


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_has_help_and_keeps_torch_out(command: str) -> None:
    code = (
        "import sys; from trtllm_serve.cli import main\n"
        f"try: main([{command!r}, '--help'])\n"
        "finally: print('HEAVY', sorted({'torch', 'transformers', 'mooncake'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Usage: ")
    assert result.stdout.rstrip().endswith("HEAVY []")


def test_short_help_says_what_the_command_itself_says() -> None:
    """The group's list is written without loading the commands, so it has its own copy of nothing but names."""
    group = click.Context(cli.main)
    assert isinstance(cli.main, cli.LazyGroup)
    for name in cli.COMMANDS:
        command = cli.main.get_command(group, name)
        assert command is not None and command.name == name and command.help


def test_version() -> None:
    result = run("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("trtllm-serve ")


def test_a_first_word_that_is_no_command_is_a_model() -> None:
    result = run("/no/such/model", "--port", "0")
    assert result.returncode == 2
    assert "/no/such/model" in result.stderr and "model" in result.stderr
    assert run("/no/such/model", "--help").stdout == run("serve", "--help").stdout


def test_a_misspelt_command_gets_a_hint() -> None:
    result = run("disagregated", "-c", "x.yaml")
    assert result.returncode == 2
    assert "disaggregated is one" in result.stderr


def test_an_unknown_option_of_the_group_is_an_error() -> None:
    result = run("--no-such-option")
    assert result.returncode == 2
    assert "--no-such-option" in result.stderr


def test_settings_errors_are_printed_one_a_line_with_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command("serve")
    def failing() -> None:
        raise SettingsError([("a.b", "must be a number"), ("", "the file is empty")])

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: failing)
    result = CliRunner().invoke(cli.main, ["serve"])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == ["Error: a.b: must be a number", "Error: the file is empty"]


@pytest.mark.parametrize(
    ("module", "expected"),
    [("torch.nn", "needs the Python package torch"), ("trtllm_serve.absent", "cannot be loaded")],
)
def test_a_missing_module_is_explained(monkeypatch: pytest.MonkeyPatch, module: str, expected: str) -> None:
    def missing(_name: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    result = CliRunner().invoke(cli.main, ["local", "--help"])
    assert result.exit_code == 1
    assert expected in result.stderr and "local" in result.stderr


def test_a_missing_extra_is_explained_when_the_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command("serve")
    def failing() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: failing)
    result = CliRunner().invoke(cli.main, ["serve"])
    assert result.exit_code == 1
    assert "pip install 'trtllm-disagg[cpu]'" in result.stderr


def test_a_bug_is_not_explained_away(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command("serve")
    def failing() -> None:
        raise ModuleNotFoundError("No module named 'our_typo'", name="our_typo")

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: failing)
    with pytest.raises(ModuleNotFoundError):
        CliRunner().invoke(cli.main, ["serve"], catch_exceptions=False)
