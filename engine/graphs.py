"""CUDA graphs of decode steps and prefill chunks, one for each bucket of sizes."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kv_pool import KvPool
from engine.models.llama_cuda import DecodeState, LlamaCuda, PrefillInputs
from engine.step import Chunk

PREFILL_BUCKETS = (32, 64, 128, 256, 384, 512, 768, 1024)
"""Tokens of a captured prefill. Beyond the last the host keeps up with the device without a graph."""
PREFILL_SEQUENCES = 8
"""Chunks of a captured prefill; a step of more is launched without a graph."""


def decode_buckets(max_batch: int) -> list[int]:
    """Batch sizes that are captured: a step takes the first that holds it, so padding stays below a half, and below
    a quarter beyond 16."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, *range(192, max_batch + 64, 64)]
    return [size for size in sizes if size < max_batch] + [max_batch]


def captured(run: Callable[[], torch.Tensor | None], memory: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor | None]:
    """A graph of what `run` enqueues, and what it returned. Runs it once before: kernels are compiled then. Graphs
    with one `memory` (a handle of torch's) share their work space, so no two of them may run at a time."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        result = run()
    return graph, result


def to_device(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy on the device. The host does not wait for it: torch keeps the pinned memory until it is done."""
    return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)


class DecodeGraphs:
    """Decode steps of up to `max_batch` rows over one pool. `launch` enqueues; the results are in `state`."""

    def __init__(self, model: LlamaCuda, pool: KvPool, max_batch: int, max_blocks: int) -> None:
        self.model, self.pool = model, pool
        self.state = DecodeState(model, max_batch, max_blocks, pool.dtype, pool.blocks.shape[1])
        self._tables = np.zeros((max_batch, max_blocks), dtype=np.int32)
        self._shown: list[list[int]] = [[] for _ in range(max_batch)]  # what each row of _tables holds
        self.buckets = decode_buckets(max_batch)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self) -> None:
        """All buckets, the largest first: the others then fit into its memory."""
        memory = torch.cuda.graph_pool_handle()
        self.state.lengths.zero_()
        for rows in reversed(self.buckets):
            step = functools.partial(self.model.decode, self.state, rows, self.pool)
            self._graphs[rows], _ = captured(step, memory)

    def launch(self, ids: torch.Tensor, tables: Sequence[list[int]], starts: Sequence[int]) -> None:
        """One token for each sequence: ids [n] (int64, on the device) at positions `starts`; `tables[i]` holds the
        blocks of the `starts[i]` tokens before it."""
        count = len(tables)
        rows = self.buckets[bisect.bisect_left(self.buckets, count)]
        lengths = np.zeros(rows, dtype=np.int32)
        lengths[:count] = np.asarray(starts, dtype=np.int32) + 1
        state, device = self.state, self.model.device
        if self._show(tables, starts):
            state.tables[:count].copy_(torch.from_numpy(self._tables[:count]).pin_memory(), non_blocking=True)
        state.lengths[:rows].copy_(torch.from_numpy(lengths).pin_memory(), non_blocking=True)
        state.ids[:count].copy_(ids.to(device, non_blocking=True))
        self._graphs[rows].replay()

    def _show(self, tables: Sequence[list[int]], starts: Sequence[int]) -> bool:
        """Brings the rows of the host's table up to date; whether any changed."""
        page = self.pool.page
        changed = False
        for row, (table, start) in enumerate(zip(tables, starts, strict=True)):
            needed, shown = table[: -(-start // page)], self._shown[row]
            if needed != shown:
                self._tables[row, : len(needed)] = needed
                self._shown[row] = needed
                changed = True
        return changed


@dataclasses.dataclass(slots=True)
class _PrefillGraph:
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor  # [T, hidden]


class PrefillGraphs:
    """Prefills over one pool: by a graph where there is one for the size, else launch by launch."""

    def __init__(self, model: LlamaCuda, pool: KvPool, max_tokens: int, max_blocks: int) -> None:
        self.model, self.pool = model, pool
        last = bisect.bisect_left(PREFILL_BUCKETS, max_tokens)
        self.buckets = list(PREFILL_BUCKETS[: last + 1])
        most, device = self.buckets[-1], model.device
        self._inputs = PrefillInputs(
            ids=torch.zeros(most, dtype=torch.int64, device=device),
            positions=torch.zeros(most, dtype=torch.int32, device=device),
            slots=torch.full((most,), -1, dtype=torch.int32, device=device),
            starts=torch.zeros(PREFILL_SEQUENCES + 1, dtype=torch.int32, device=device),
            lengths=torch.zeros(PREFILL_SEQUENCES, dtype=torch.int32, device=device),
            tables=torch.zeros(PREFILL_SEQUENCES, max_blocks, dtype=torch.int32, device=device),
        )
        self._graphs: dict[tuple[int, bool], _PrefillGraph] = {}

    def capture(self) -> None:
        memory = torch.cuda.graph_pool_handle()
        for tokens in reversed(self.buckets):
            for fresh in (False, True):
                step = functools.partial(self.model.prefill, self._view(tokens, fresh), self.pool)
                graph, hidden = captured(step, memory)
                assert hidden is not None
                self._graphs[tokens, fresh] = _PrefillGraph(graph, hidden)

    def launch(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Residual rows [>= T, hidden] of the packed chunks, in their order; valid until the next launch."""
        total = sum(len(chunk.tokens) for chunk in chunks)
        fresh = len(chunks) == 1 and chunks[0].start == 0
        at = bisect.bisect_left(self.buckets, total)
        tokens = self.buckets[at] if at < len(self.buckets) and len(chunks) <= PREFILL_SEQUENCES else None
        packed = self._packed(chunks, tokens or total, PREFILL_SEQUENCES if tokens else len(chunks), fresh)
        if tokens is None or (tokens, fresh) not in self._graphs:
            return self.model.prefill(packed, self.pool)
        view = self._view(tokens, fresh)
        for name in ("ids", "positions", "slots", "starts", "lengths"):
            getattr(view, name).copy_(getattr(packed, name))
        view.tables[:, : packed.tables.shape[1]].copy_(packed.tables)
        graph = self._graphs[tokens, fresh]
        graph.graph.replay()
        return graph.hidden

    def _view(self, tokens: int, fresh: bool) -> PrefillInputs:
        inputs = self._inputs
        return PrefillInputs(
            inputs.ids[:tokens], inputs.positions[:tokens], inputs.slots[:tokens],
            inputs.starts, inputs.lengths, inputs.tables, fresh,
        )  # fmt: skip

    def _packed(self, chunks: Sequence[Chunk], tokens: int, sequences: int, fresh: bool) -> PrefillInputs:
        """The chunks as arrays on the device, padded to `tokens` and `sequences`."""
        page = self.pool.page
        ids, positions = np.zeros(tokens, dtype=np.int64), np.zeros(tokens, dtype=np.int32)
        slots = np.full(tokens, -1, dtype=np.int32)
        starts, lengths = np.zeros(sequences + 1, dtype=np.int32), np.zeros(sequences, dtype=np.int32)
        ends = [chunk.start + len(chunk.tokens) for chunk in chunks]
        tables = np.zeros((sequences, -(-max(ends) // page)), dtype=np.int32)
        at = 0
        for row, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
            rows = slice(at, at + len(chunk.tokens))
            blocks = -(-end // page)
            if not chunk.tokens or len(chunk.block_table) < blocks:
                raise ValueError(
                    f"chunk: {len(chunk.tokens)} tokens from {chunk.start} in {len(chunk.block_table)} blocks of {page}"
                )
            tables[row, :blocks] = chunk.block_table[:blocks]
            span = np.arange(chunk.start, end, dtype=np.int32)
            ids[rows], positions[rows] = chunk.tokens, span
            slots[rows] = tables[row, span // page] * page + span % page
            lengths[row] = end
            at = rows.stop
            starts[row + 1] = at
        starts[len(chunks) + 1 :] = at
        device = self.model.device
        return PrefillInputs(
            ids=to_device(ids, device),
            positions=to_device(positions, device),
            slots=to_device(slots, device),
            starts=to_device(starts, device),
            lengths=to_device(lengths, device),
            tables=to_device(tables, device),
            fresh=fresh,
        )
