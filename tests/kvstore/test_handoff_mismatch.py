"""C098, C099, C100: a pair that differs in anything that changes KV bytes is refused: the field and both values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstore.handoff import HANDLE_VERSION, Handle, StartState
from kvstore.protocol import Fingerprint

OURS = Fingerprint("weights-a", "tokens-a", "bfloat16", "block_nhd", 32, 4, 2, 32, 1)
OTHER: dict[str, Any] = {
    "model": "weights-b",
    "tokenizer": "tokens-b",
    "kv_dtype": "float16",  # of the same size: bytes alone would not tell
    "layout": "block_hnd",
    "block_size": 48,
    "num_layers": 5,
    "num_kv_heads": 4,
    "head_dim": 64,
    "tp_size": 2,
}


def handle_of(identity: Fingerprint | None, digest: str) -> Handle:
    start = StartState(0, 1, 1)
    handle = Handle(HANDLE_VERSION, 1, "i", digest, "ctx:8000", 1, [0], [1], [start], identity=identity)
    return Handle.decode(handle.encode())


@pytest.mark.parametrize("field", OTHER)
def test_each_field_is_named_with_both_values(field: str) -> None:
    theirs = msgspec.structs.replace(OURS, **{field: OTHER[field]})
    reason = handle_of(theirs, theirs.digest()).mismatch(OURS.digest(), OURS)
    assert reason is not None
    assert f"{field}: {getattr(OURS, field)} here, {OTHER[field]} there" in reason and "ctx:8000" in reason
    assert reason.count(" here, ") == 1


def test_equal_ones_pair_and_unknown_ones_are_told_by_digest() -> None:
    assert set(OTHER) <= set(msgspec.structs.asdict(OURS))
    assert handle_of(OURS, OURS.digest()).mismatch(OURS.digest(), OURS) is None
    reason = handle_of(None, "e" * 32).mismatch("f" * 32, None)
    assert reason is not None and "e" * 32 in reason and "f" * 32 in reason
