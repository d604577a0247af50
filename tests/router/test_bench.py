"""The bench runs and its figures make sense; how good they are depends on the machine."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_router", ROOT / "bench" / "router.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.cluster
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the bench's worker and load generator are C")
def test_a_short_run(bench: ModuleType) -> None:
    results = bench.run(runs=1, seconds=0.3, workers=1)
    assert results.keys() == {"direct", "router"}
    assert 0 < results["direct"]["cpu_us_per_request"] < results["router"]["cpu_us_per_request"] < 5000
    table = bench.table(results)
    assert "us of CPU a two-hop request" in table and "cpu_us_per_chunk" in table
