"""Rows taken from a step's logits: by the stream that computes them, on behalf of a caller that knows of none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from engine import cuda_runner
from engine.cuda_runner import StepLogits
from engine.step import Sampled


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The streams in force, innermost last, when rows go to the device."""
    current: list[Any] = []
    seen: list[Any] = []

    @contextlib.contextmanager
    def stream(of: Any) -> Iterator[None]:
        current.append(of)
        yield
        current.pop()

    def to_device(values: Any, device: Any) -> torch.Tensor:
        seen.extend(current)
        return torch.from_numpy(values)

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(cuda_runner, "to_device", to_device)
    return seen


def test_rows_are_taken_on_the_stream_of_the_step(streams: list[Any]) -> None:
    mine: Any = object()
    values = torch.tensor([[0.0, 1.0], [3.0, 2.0], [4.0, 5.0]])
    logits = StepLogits(values, greedy=(torch.tensor([1, 0, 1]), torch.tensor([1.0, 3.0, 5.0])), stream=mine)
    rows = logits[[2, 0, 2]][[0, 1]]
    assert streams == [mine, mine]
    assert rows.values is not None
    assert rows.greedy is not None
    assert rows.values.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert [each.tolist() for each in rows.greedy] == [[1, 1], [5.0, 1.0]]
    assert rows.next is None and len(rows) == 2


def test_drawn_rows_need_no_device(streams: list[Any]) -> None:
    logits = StepLogits(None, drawn=[Sampled(7), Sampled(8), Sampled(9)])
    assert [each.token for each in logits[[2, 0]].drawn or []] == [9, 7]
    assert streams == []
