"""A test-only model that answers from a script in its prompt, and reads the whole prompt back from the paged pool.

Loaded by `--custom_module_dirs`; README.md has the grammar. Nothing is remembered between steps: each step stores its
tokens in their KV slots, reads the sequence back through the block table and derives the next token from that alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import torch

from engine.attention import StepMeta
from engine.kv_pool import KvPool
from engine.models.registry import register_architecture
from engine.weights import Weights

BOS, EOS, IM_START, IM_END, EOS2, END_OF_PROMPT = range(256, 262)
NAMED = {"BOS": BOS, "EOS": EOS, "EOS2": EOS2}
DAMAGED = ord("!")  # the answer when a slot does not hold what this sequence put there
SECOND_BEST = ord(".")  # drawn when the scripted token is banned

# Sequences are matched as strings of one character a token: chr(0)-chr(255) bytes, chr(256)- specials.
_MARKS = f"{chr(IM_START)}{chr(IM_END)}{chr(END_OF_PROMPT)}"
_SCRIPT = re.compile(rf"\$SCRIPT(_BYTES|_TEXT|_RAW)?:([^;{_MARKS}]*)(?=[;{chr(IM_END)}{chr(END_OF_PROMPT)}])")
_UP_TO_ANSWER = re.compile(
    f";?(?:{chr(IM_END)}(?:.*{chr(IM_START)}assistant\n)?)?{chr(END_OF_PROMPT)}?", flags=re.DOTALL
)


def script_tokens(kind: str | None, text: str) -> list[int]:
    """The tokens that a script asks for; EOS follows when they are used up."""
    if kind in ("_BYTES", "_TEXT"):
        return [ord(char) for char in text]
    tokens: list[int] = []
    for piece in text.split("|"):
        if kind == "_RAW":
            digits, _, times = piece.partition("*")
            tokens += bytes.fromhex(digits) * int(times or 1)
        else:
            tokens += [NAMED[piece]] if piece in NAMED else [ord(char) for char in piece]
    return tokens


def next_logits(sequence: str, vocab_size: int) -> torch.Tensor:
    """What follows a sequence: by its last script, or without one at random from a hash of all its tokens."""
    scripts = list(_SCRIPT.finditer(sequence))
    if not scripts:
        digest = blake2b(sequence.encode("utf-16-le"), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        logits = torch.full((vocab_size,), -30.0)
        logits[32:127] = torch.rand(95, generator=generator) * 8
        return logits
    last = scripts[-1]
    tokens = script_tokens(last[1], last[2])
    answer = _UP_TO_ANSWER.match(sequence, last.end())
    emitted = len(sequence) - (answer.end() if answer else last.end())
    return _certain(tokens[emitted] if emitted < len(tokens) else EOS, vocab_size)


def _certain(token: int, vocab_size: int) -> torch.Tensor:
    logits = torch.full((vocab_size,), -40.0)
    logits[SECOND_BEST] = 0.0
    logits[token] = 40.0
    return logits


class ScriptedModel:
    """KV of a token at a position: three octal digits of the token id, a running checksum of the sequence up to it,
    and beside each of these four the position in base 128."""

    def __init__(self, config: Mapping[str, Any], weights: Weights, dtype: torch.dtype) -> None:
        self.vocab_size = int(config["vocab_size"])

    def forward(self, ids: torch.Tensor, meta: StepMeta, pool: KvPool) -> torch.Tensor:
        tables = {}
        for first, count, table in _sequences(meta):
            start = int(meta.positions[first])
            checksum = int(self._slot_codes(table, pool)[start - 1, 3, 0]) if start else 0
            for row in range(first, first + count):
                checksum = _checksum(checksum, int(ids[row]))
                _store(pool, int(meta.slots[row]), int(meta.positions[row]), int(ids[row]), checksum)
            tables[first + count - 1] = table
        rows = [self._answer(tables[row], int(meta.positions[row]) + 1, pool) for row in meta.wanted.tolist()]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    @staticmethod
    def _slot_codes(table: torch.Tensor, pool: KvPool) -> torch.Tensor:
        """[slots, 4, head_dim]: keys and values of both layers, in the sequence's order."""
        stores = (pool.keys[0], pool.values[0], pool.keys[1], pool.values[1])
        return torch.stack([store[table].flatten(0, 1)[:, 0] for store in stores], dim=1)

    def _answer(self, table: torch.Tensor, length: int, pool: KvPool) -> torch.Tensor:
        codes = self._slot_codes(table, pool)[:length].long().clamp(0, 511).tolist()
        sequence, checksum = [], 0
        for position, slot in enumerate(codes):
            token = slot[0][0] + 8 * slot[1][0] + 64 * slot[2][0]
            checksum = _checksum(checksum, token)
            place = _place(position)
            if slot[3][0] != checksum or any(code[1:] != place for code in slot):
                return _certain(DAMAGED, self.vocab_size)
            sequence.append(chr(token))
        return next_logits("".join(sequence), self.vocab_size)


def _sequences(meta: StepMeta) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(first packed row, rows, block table) of every sequence of the step."""
    for group in meta.decodes:
        for row, table in zip(group.rows.tolist(), group.tables, strict=True):
            yield row, 1, table
    for chunk in meta.prefills:
        first, last = chunk.segments[0].rows.start, chunk.segments[-1].rows.stop
        yield first, last - first, chunk.table


def _checksum(before: int, token: int) -> int:
    return (before * 31 + token + 1) % 127


def _place(position: int) -> list[int]:
    return [position % 128, position // 128 % 128, position // 16384]


def _store(pool: KvPool, slot: int, position: int, token: int, checksum: int) -> None:
    block, offset = divmod(slot, pool.page)
    place = _place(position)
    for store, code in (
        (pool.keys[0], token % 8),
        (pool.values[0], token // 8 % 8),
        (pool.keys[1], token // 64),
        (pool.values[1], checksum),
    ):
        store[block, offset, 0] = torch.tensor([code, *place], dtype=pool.dtype)


register_architecture("ScriptedForCausalLM", ScriptedModel)
