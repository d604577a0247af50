"""Paged attention on the CPU: what one step needs to know, and the attention of its rows over the pool.

Rows of a step are packed: the decode rows first (one token of a sequence each), then the prefill chunks. Rows whose
block counts have the same bit length are decoded together by one gather and one attention call, so that padding at
most doubles the work of a row. Where a row sees how much is a mask in every call, and keys are always whole blocks: so
a row's sums are taken in one order, whichever rows share its call.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from engine.kv_pool import KvPool
from engine.step import Chunk

GATHER_BYTES = 2 << 20
"""Keys gathered by one decode call at most: more falls out of the cache before it is read, and costs page faults."""

SEGMENT_ROWS = 64
"""Rows of a prompt attended to in one call: fewer cost more calls, more read more keys that a row does not see."""


@dataclasses.dataclass(slots=True)
class DecodeGroup:
    """Decode rows that are attended to in one call."""

    rows: torch.Tensor  # [B] packed row of each
    tables: torch.Tensor  # [B, blocks]; short rows repeat their last block
    hidden: torch.Tensor  # [B, 1, 1, blocks * page] float32: 0 where a row sees, -inf elsewhere


@dataclasses.dataclass(slots=True)
class Segment:
    """Consecutive rows of a chunk that are attended to in one call."""

    rows: slice  # packed rows
    hidden: torch.Tensor  # [rows, slots] float32: 0 where a row sees, -inf elsewhere


@dataclasses.dataclass(slots=True)
class PrefillChunk:
    """The last tokens of one sequence. Its rows are cut into segments, so that few keys beyond a row are read."""

    segments: list[Segment]
    table: torch.Tensor  # [blocks of the sequence, with this chunk]


@dataclasses.dataclass(slots=True)
class StepMeta:
    """Where the packed rows of one step stand, where their K and V go, and what they attend to."""

    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64: block * page + offset
    decodes: list[DecodeGroup]
    prefills: list[PrefillChunk]
    wanted: torch.Tensor  # packed rows whose logits are wanted, in the order of the chunks

    @classmethod
    def of(cls, chunks: Sequence[Chunk], page: int, gather_slots: int = 1 << 30) -> tuple[torch.Tensor, StepMeta]:
        """Packed ids [T] and the metadata of a step; decode groups of at most `gather_slots` slots where they have
        more than one row. ValueError if a chunk is empty or its table is too short."""
        order = sorted(range(len(chunks)), key=lambda index: len(chunks[index].tokens) > 1)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        first = [0] * len(chunks)
        for index in order:
            chunk = chunks[index]
            _check(chunk, page)
            first[index] = len(ids)
            ids += chunk.tokens
            span = range(chunk.start, chunk.start + len(chunk.tokens))
            positions += span
            slots += [chunk.block_table[at // page] * page + at % page for at in span]
        decodes = [(first[index], chunks[index]) for index in order if len(chunks[index].tokens) == 1]
        return torch.tensor(ids, dtype=torch.int64), cls(
            positions=torch.tensor(positions, dtype=torch.int64),
            slots=torch.tensor(slots, dtype=torch.int64),
            decodes=[_decode_group(group, page) for group in _alike(decodes, page, gather_slots)],
            prefills=[_prefill(first[i], chunks[i], page) for i in order if len(chunks[i].tokens) > 1],
            wanted=torch.tensor(
                [
                    row
                    for at, chunk in zip(first, chunks, strict=True)
                    for row in _wanted(at + len(chunk.tokens), chunk)
                ],
                dtype=torch.int64,
            ),
        )


def _wanted(end: int, chunk: Chunk) -> range:
    """The packed rows whose logits a chunk wants; `end` is the row after its last."""
    return range(end - chunk.logit_rows, end)


def _check(chunk: Chunk, page: int) -> None:
    end = chunk.start + len(chunk.tokens)
    if not chunk.tokens or len(chunk.block_table) * page < end:
        raise ValueError(
            f"chunk: {len(chunk.tokens)} tokens from {chunk.start} in {len(chunk.block_table)} blocks of {page}"
        )


def _alike(rows: list[tuple[int, Chunk]], page: int, gather_slots: int) -> Iterator[list[tuple[int, Chunk]]]:
    """Rows in groups whose block counts have the same bit length."""
    by_size: dict[int, list[tuple[int, Chunk]]] = defaultdict(list)
    for row, chunk in rows:
        by_size[(chunk.start // page + 1).bit_length()].append((row, chunk))
    for size, members in by_size.items():
        together = max(1, gather_slots // (page << size))
        for at in range(0, len(members), together):
            yield members[at : at + together]


def _decode_group(members: list[tuple[int, Chunk]], page: int) -> DecodeGroup:
    lengths = [chunk.start + 1 for _, chunk in members]
    blocks = max(-(-length // page) for length in lengths)
    tables = []
    for (_, chunk), length in zip(members, lengths, strict=True):
        own = chunk.block_table[: -(-length // page)]
        tables.append(own + own[-1:] * (blocks - len(own)))
    beyond = torch.arange(blocks * page) >= torch.tensor(lengths)[:, None]
    hidden = torch.zeros(len(lengths), blocks * page).masked_fill_(beyond, float("-inf"))[:, None, None]
    return DecodeGroup(torch.tensor([row for row, _ in members]), torch.tensor(tables), hidden)


def _prefill(first: int, chunk: Chunk, page: int) -> PrefillChunk:
    end = chunk.start + len(chunk.tokens)
    segments = []
    at = chunk.start
    while at < end:
        to = min(end, at - at % SEGMENT_ROWS + SEGMENT_ROWS)
        slots = -(-to // page) * page
        hidden = torch.zeros(to - at, slots)
        hidden.masked_fill_(torch.arange(slots) > torch.arange(at, to)[:, None], float("-inf"))
        segments.append(Segment(slice(first + at - chunk.start, first + to - chunk.start), hidden))
        at = to
    return PrefillChunk(segments, torch.tensor(chunk.block_table[: -(-end // page)]))


def paged_attention(query: torch.Tensor, pool: KvPool, layer: int, meta: StepMeta, scale: float) -> torch.Tensor:
    """Attention of the packed rows [T, heads, dim] over the pool, which holds this step's K and V already."""
    out = torch.empty_like(query)
    keys, values = pool.keys[layer], pool.values[layer]
    for group in meta.decodes:
        out[group.rows] = _decode(query[group.rows], keys, values, group, scale)
    for chunk in meta.prefills:
        _attend_chunk(query, keys, values, chunk, scale, out)
    return out


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: DecodeGroup, scale: float
) -> torch.Tensor:
    batch, heads, dim = query.shape
    kv_heads = keys.shape[2]
    # The query heads of one KV head become rows of one product, so that K and V are never repeated.
    folded = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(
        folded,
        _gather(keys, group.tables),
        _gather(values, group.tables),
        attn_mask=group.hidden.to(query.dtype),
        scale=scale,
    )
    return out.reshape(batch, heads, dim)


def _attend_chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk: PrefillChunk,
    scale: float,
    out: torch.Tensor,
) -> None:
    table, grouped = chunk.table[None], query.shape[1] > keys.shape[2]
    own_keys, own_values = _gather(keys, table), _gather(values, table)
    for segment in chunk.segments:
        slots = segment.hidden.shape[1]
        attended = F.scaled_dot_product_attention(
            query[segment.rows].transpose(0, 1)[None],
            own_keys[:, :, :slots],
            own_values[:, :, :slots],
            attn_mask=segment.hidden.to(query.dtype),
            scale=scale,
            enable_gqa=grouped,
        )
        out[segment.rows] = attended[0].transpose(0, 1)


def _gather(store: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """[B, kv_heads, blocks * page, dim] of a layer's keys or values, for tables [B, blocks]."""
    batch, blocks = tables.shape
    _, page, heads, dim = store.shape
    return store.index_select(0, tables.flatten()).view(batch, blocks * page, heads, dim).transpose(1, 2)


def fresh_tails(chunks: Sequence[Chunk], page: int) -> list[tuple[int, int]]:
    """(block, first unused offset) of each partly filled block that a chunk begins in this step.

    Their unused slots still hold a former owner's bytes. Cleared, they can neither reach another worker with a
    hand-off of the block nor, as NaN, spoil masked attention.
    """
    tails = []
    for chunk in chunks:
        end = chunk.start + len(chunk.tokens)
        if end % page and end - end % page >= chunk.start:
            tails.append((chunk.block_table[end // page], end % page))
    return tails
