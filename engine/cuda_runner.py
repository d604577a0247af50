"""Runs steps of a Llama-family model on a CUDA device, and keeps the device a step ahead of the host.

While the host still deals with the tokens of one step, the device computes the next on the guess that every sequence
goes on: its input ids are the tokens just drawn, which need not be known to the host. A guessed step only reads the
pool; K and V of its tokens are staged, and are stored when `run` is given a chunk that agrees with the guess. So a
wrong guess (a sequence that has ended, a preemption) costs time and nothing else, and blocks may be freed, handed over
and refilled meanwhile.

    run(chunks):   store what was guessed right | decode the other single tokens | prefill the other chunks -> logits
    sample(logits, specs):   draw on the device -> launch the next decode with these tokens -> wait for the draw alone
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from engine import sampler, sampler_cuda
from engine.attention import fresh_tails
from engine.graphs import DecodeGraphs, PrefillGraphs, to_device
from engine.kernels.decode_attention import store_staged
from engine.kv_pool import KvPool
from engine.models.llama_cuda import LlamaCuda
from engine.step import BadLogits, Chunk, Sampled, SampleSpec


@dataclasses.dataclass(slots=True)
class Continuation:
    """Where the token after a row's is computed, if its sequence goes on."""

    table: list[int]  # the sequence's own list: it grows with the sequence
    start: int


@dataclasses.dataclass(slots=True)
class StepLogits:
    """Logits of one step, on the device; valid until tokens have been drawn from them."""

    values: torch.Tensor | None  # [n, vocab] float32
    next: list[Continuation] | None = None  # of each row; None: the rows are not one for one sequence
    greedy: tuple[torch.Tensor, torch.Tensor] | None = None  # best tokens [n] and logits [n]
    drawn: list[Sampled] | None = None  # already, beside rows that could not be
    stream: torch.cuda.Stream | None = None  # that computes them: whoever takes rows need not know of it

    def __len__(self) -> int:
        rows = self.drawn if self.values is None else self.values
        return 0 if rows is None else len(rows)

    def __getitem__(self, rows: list[int]) -> StepLogits:
        if self.drawn is not None:
            return StepLogits(None, drawn=[self.drawn[row] for row in rows])
        assert self.values is not None
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            at = to_device(np.asarray(rows, dtype=np.int64), self.values.device)
            greedy = None if self.greedy is None else (self.greedy[0][at], self.greedy[1][at])
            return StepLogits(self.values[at], greedy=greedy, stream=self.stream)


@dataclasses.dataclass(slots=True)
class _Guess:
    """A decode step on the device whose inputs the host has not confirmed."""

    rows: list[Continuation]
    tokens: list[int]


class CudaRunner:
    """Owns the model's graphs and its place in the pool. Not thread-safe: one step at a time.

    All work goes to `stream`. Whoever else touches the pool's blocks (a hand-off, a copy to the host) waits for
    `fence()` before reading what a step wrote, and makes `stream` wait for its own writes.
    """

    def __init__(self, model: LlamaCuda, pool: KvPool, max_batch: int, max_tokens: int, max_seq_len: int) -> None:
        self.model, self.pool = model, pool
        self.vocab_size = model.vocab_size
        self.device = model.device
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.runs_ahead = True
        """Off where decoding is not what comes next: on a context worker."""
        self.settles = False
        """On where others read blocks once `run` returns: a step from which nothing is drawn is then waited for."""
        self.guesses = self.right_guesses = 0  # rows computed ahead, and those of use
        max_blocks = -(-max_seq_len // pool.page)
        self._decodes = DecodeGraphs(model, pool, max_batch, max_blocks)
        self._prefills = PrefillGraphs(model, pool, max_tokens, max_blocks)
        self._max_batch, self._max_seq_len = max_batch, max_seq_len
        self._guess: _Guess | None = None
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self._decodes.capture()
            self._prefills.capture()
        torch.cuda.synchronize(self.device)

    def fence(self) -> torch.cuda.Event:
        """Reached when all steps so far are computed and stored."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def copy_block(self, source: int, target: int) -> None:
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self.pool.copy_block(source, target)

    # ------------------------------------------------------------ run

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> StepLogits:
        """See runner.Runner; the host does not wait for the logits."""
        with torch.cuda.stream(self.stream):
            self.pool.clear_tails(fresh_tails(chunks, self.pool.page))
            logits = self._logits(chunks)
            logits.stream = self.stream
            if self.settles and not len(logits):
                self.stream.synchronize()
            return logits

    def _logits(self, chunks: Sequence[Chunk]) -> StepLogits:
        guess, self._guess = self._guess, None
        single = [index for index, chunk in enumerate(chunks) if len(chunk.tokens) == 1]
        lanes = self._confirmed(guess, [chunks[index] for index in single])
        right = {index: lane for index, lane in zip(single, lanes, strict=True) if lane is not None}
        wrong = [index for index in single if index not in right]
        longer = [index for index, chunk in enumerate(chunks) if len(chunk.tokens) != 1]
        parts: list[tuple[list[int], StepLogits]] = []  # chunk index of each row, and the rows
        if right:
            alone = not wrong and not longer
            parts.append((list(right), self._rows_of_guess(list(right.values()), alone)))
        for at in range(0, len(wrong), self._max_batch):
            some = wrong[at : at + self._max_batch]
            alone = len(some) == len(chunks)
            parts.append((some, self._decode([chunks[index] for index in some], alone)))
        if longer:
            parts.append(self._prefill(chunks, longer))
        return self._assemble(chunks, parts)

    def _confirmed(self, guess: _Guess | None, chunks: list[Chunk]) -> list[int | None]:
        """The row of the guess that computed each chunk. Stores K and V of those rows in the pool."""
        if guess is None:
            return [None] * len(chunks)
        lane_of = {id(row.table): lane for lane, row in enumerate(guess.rows)}
        slots = np.full(len(guess.rows), -1, dtype=np.int32)
        lanes: list[int | None] = []
        for chunk in chunks:
            lane = lane_of.get(id(chunk.block_table))
            if lane is not None and (guess.rows[lane].start, guess.tokens[lane]) != (chunk.start, chunk.tokens[0]):
                lane = None
            lanes.append(lane)
            if lane is not None:
                slots[lane] = self._slot(chunk)
                self.right_guesses += 1
        if (slots >= 0).any():
            store_staged(self._decodes.state.staged, self.pool.blocks, to_device(slots, self.device))
        return lanes

    def _slot(self, chunk: Chunk) -> int:
        page = self.pool.page
        return chunk.block_table[chunk.start // page] * page + chunk.start % page

    def _rows_of_guess(self, lanes: list[int], alone: bool) -> StepLogits:
        state = self._decodes.state
        count = len(lanes)
        if alone and lanes == list(range(count)):
            return StepLogits(state.logits[:count], greedy=(state.tokens[:count], state.best[:count]))
        rows = to_device(np.asarray(lanes, dtype=np.int64), self.device)
        return StepLogits(state.logits[rows], greedy=(state.tokens[rows], state.best[rows]))

    def _decode(self, chunks: list[Chunk], alone: bool) -> StepLogits:
        ids = to_device(np.asarray([chunk.tokens[0] for chunk in chunks], dtype=np.int64), self.device)
        self._decodes.launch(ids, [chunk.block_table for chunk in chunks], [chunk.start for chunk in chunks])
        slots = np.asarray([self._slot(chunk) for chunk in chunks], dtype=np.int32)
        store_staged(self._decodes.state.staged, self.pool.blocks, to_device(slots, self.device))
        return self._rows_of_guess(list(range(len(chunks))), alone)

    def _prefill(self, chunks: Sequence[Chunk], indexes: list[int]) -> tuple[list[int], StepLogits]:
        hidden = self._prefills.launch([chunks[index] for index in indexes])
        owners: list[int] = []
        rows: list[int] = []
        end = 0
        for index in indexes:
            end += len(chunks[index].tokens)
            wanted = chunks[index].logit_rows
            owners += [index] * wanted
            rows += range(end - wanted, end)
        logits = torch.empty(len(rows), self.vocab_size, dtype=torch.float32, device=self.device)
        if rows:
            wanted_rows = hidden[to_device(np.asarray(rows, dtype=np.int64), self.device)]
            self.model.head_logits(wanted_rows, torch.empty_like(wanted_rows), logits)
        return owners, StepLogits(logits, greedy=self._best(logits))

    def _best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.empty(len(logits), dtype=torch.int64, device=self.device)
        best = torch.empty(len(logits), dtype=torch.float32, device=self.device)
        for at in range(0, len(logits), self._max_batch):
            rows = slice(at, at + self._max_batch)
            self._decodes.state.argmax(logits[rows], tokens[rows], best[rows])
        return tokens, best

    def _assemble(self, chunks: Sequence[Chunk], parts: list[tuple[list[int], StepLogits]]) -> StepLogits:
        """The wanted rows, in the order of the chunks."""
        owners = [owner for part, _ in parts for owner in part]
        order = sorted(
            (at for at, owner in enumerate(owners) if chunks[owner].logit_rows), key=lambda at: (owners[at], at)
        )
        one_each = all(chunks[owner].logit_rows <= 1 for owner in owners)
        following = [
            Continuation(chunks[owners[at]].block_table, chunks[owners[at]].start + len(chunks[owners[at]].tokens))
            for at in order
        ]
        if len(parts) == 1 and order == list(range(len(owners))):
            [(_, result)] = parts
        elif parts:
            known = [(part.values, *part.greedy) for _, part in parts if part.values is not None and part.greedy]
            values, tokens, best = (torch.cat(each) for each in zip(*known, strict=True))
            result = StepLogits(values, greedy=(tokens, best))[order]
        else:
            result = StepLogits(torch.empty(0, self.vocab_size, device=self.device))
        result.next = following if one_each else None
        return result

    # ------------------------------------------------------------ sample

    @torch.inference_mode()
    def sample(self, logits: StepLogits, specs: Sequence[SampleSpec]) -> list[Sampled]:
        """See sampler.sample. Before it waits for the tokens, the next step is on its way."""
        if logits.drawn is not None:
            return logits.drawn
        assert logits.values is not None
        if len(logits) != len(specs):
            raise ValueError(f"logits: {len(logits)} rows for {len(specs)} specs")
        if not specs:
            return []
        with torch.cuda.stream(self.stream):
            if all(map(sampler_cuda.is_simple, specs)):
                return self._sample_ahead(logits, specs)
            sampled = sampler.sample(logits.values, specs)
            tokens = [each.token for each in sampled]
            self._go_on(logits.next, to_device(np.asarray(tokens, dtype=np.int64), self.device), tokens)
            return sampled

    def _sample_ahead(self, logits: StepLogits, specs: Sequence[SampleSpec]) -> list[Sampled]:
        assert logits.values is not None
        draws = sampler_cuda.draw(logits.values, specs, logits.greedy)
        self._go_on(logits.next, draws.tokens, [])
        tokens, states = draws.wait()
        deeper = [row for row, state in enumerate(states) if state == 0]
        if deeper:
            assert draws.kept is not None
            rows = to_device(np.asarray(deeper, dtype=np.int64), self.device)
            again = sampler.sample(draws.kept[rows], [specs[row] for row in deeper])
            for row, each in zip(deeper, again, strict=True):
                tokens[row] = each.token
        if self._guess is not None:
            self._guess.tokens = list(tokens)
            for row in deeper:
                self._guess.tokens[row] = -1  # the device went on with what it had, which is not worth comparing
        sampled = [Sampled(token) for token in tokens]
        bad = [row for row, state in enumerate(states) if state < 0]
        if bad:
            logits.drawn = sampled
            raise BadLogits(bad)
        return sampled

    def _go_on(self, rows: list[Continuation] | None, ids: torch.Tensor, tokens: list[int]) -> None:
        """Launches the step in which every row's sequence goes on."""
        if not self.runs_ahead or not rows or len(rows) > self._max_batch:
            return
        if len({id(row.table) for row in rows}) != len(rows) or any(row.start >= self._max_seq_len for row in rows):
            return
        self._decodes.launch(ids, [row.table for row in rows], [row.start for row in rows])
        self._guess = _Guess(rows, tokens)
        self.guesses += len(rows)
