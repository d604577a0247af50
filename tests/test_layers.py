"""The import arrows of docs/structures.md, read from the source: a package imports only what stands below it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = {"mooncake_pool": "mooncake/mooncake_pool"}
BELOW: dict[str, set[str]] = {
    "kvstore": set(),
    "mooncake_pool": {"kvstore"},
    "engine": {"kvstore", "mooncake_pool"},
    "openai_api": {"kvstore", "engine"},
    "context_worker": {"kvstore", "mooncake_pool", "engine", "openai_api"},
    "generation_worker": {"kvstore", "mooncake_pool", "engine", "openai_api", "context_worker"},
    "router": {"kvstore", "openai_api"},
    "trtllm_serve": {
        "kvstore", "mooncake_pool", "engine", "openai_api", "context_worker", "generation_worker", "router",
    },
}  # fmt: skip


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", BELOW)
def test_imports_point_down(package: str) -> None:
    folder = ROOT / FOLDER.get(package, package)
    files = sorted(folder.rglob("*.py"))
    assert files
    for path in files:
        upward = (imports_of(path) & set(BELOW)) - BELOW[package] - {package}
        assert not upward, f"{path.relative_to(ROOT)} imports {sorted(upward)}"


def test_mooncake_folder_is_no_package() -> None:
    """The Mooncake wheel owns the import name `mooncake`; a file here would shadow it."""
    assert not (ROOT / "mooncake" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("trtllm_serve.cli", {"torch", "fastapi", "mooncake", "transformers"}),
        ("router.app", {"torch", "transformers", "mooncake"}),
        ("engine.client", {"torch", "transformers", "mooncake"}),
        ("generation_worker.app", {"torch", "transformers", "mooncake"}),
    ],
)
def test_light_imports(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; print(sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
