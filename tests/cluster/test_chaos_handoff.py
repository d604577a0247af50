"""A short run of bench/chaos.py: nothing wrong, nothing leaked, nothing stuck, whatever dies meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"


@pytest.mark.parametrize(("seed", "backend"), [(5, "DEFAULT"), (6, "NIXL")])
def test_chaos(seed: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    chaos = __import__("chaos")
    assert Path(sys.modules["chaos"].__file__ or "").parent == BENCH
    result = chaos.handoff(seed, requests=60, faults=5, backend=backend, clients=4, quiet=True)
    assert not result["problems"], result
    assert result["counts"]["right"] > 20, result


def test_the_seed_is_the_whole_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    chaos = __import__("chaos")
    assert chaos.plan(3, 200, 9) == chaos.plan(3, 200, 9) != chaos.plan(4, 200, 9)
    assert sum(step.fault is not None for step in chaos.plan(3, 200, 9)) == 9
    assert chaos.body_of(7) == chaos.body_of(7)
