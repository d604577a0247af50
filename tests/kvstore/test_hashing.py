"""Block keys: one chain for engine, events, router and pool."""

from __future__ import annotations

import struct
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.hashing import KEY_BYTES, block_keys, chain_seed, v1_block_key

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=100)
SIZES = st.integers(1, 40)


def documented_chain(tokens: list[int], size: int, salt: str) -> list[bytes]:
    """The pool's documented chain, written down once more without the shortcuts."""
    key = blake2b(b"salt" + salt.encode(), digest_size=16).digest()
    keys = []
    for start in range(0, len(tokens) - len(tokens) % size, size):
        packed = b"".join(struct.pack("<q", token) for token in tokens[start : start + size])
        key = blake2b(key + packed, digest_size=16).digest()
        keys.append(key)
    return keys


@given(TOKENS, SIZES, st.text(max_size=5))
def test_the_chain_is_the_documented_one(tokens: list[int], size: int, salt: str) -> None:
    keys = block_keys(tokens, size, salt)
    assert keys == documented_chain(tokens, size, salt)
    assert len(keys) == len(tokens) // size
    assert all(len(key) == KEY_BYTES for key in keys)


def test_keys_do_not_change_between_versions() -> None:
    """Pools outlive processes: another value here makes every stored block unreachable."""
    assert [key.hex() for key in block_keys(list(range(8)), 4)] == [
        "f3a4ac79847f8c7998d82a5d8637b6e4",
        "b6171a6224918aef6de608bdf8ff4e0b",
    ]
    assert chain_seed("tenant", "adapter").hex() == "bf0c4e6452c0b8e3d3410615ef571f46"


@given(TOKENS, TOKENS, SIZES)
def test_equal_keys_mean_equal_prefixes(left: list[int], right: list[int], size: int) -> None:
    common = 0
    for a, b in zip(block_keys(left, size), block_keys(right, size), strict=False):
        if a != b:
            break
        common += 1
    assert left[: common * size] == right[: common * size]
    assert (
        left[: (common + 1) * size] != right[: (common + 1) * size] or min(len(left), len(right)) < (common + 1) * size
    )


@given(TOKENS, SIZES, st.integers(0, 5))
def test_a_chain_can_be_continued(tokens: list[int], size: int, done: int) -> None:
    whole = block_keys(tokens, size, "s")
    done = min(done, len(whole))
    parent = whole[done - 1] if done else None
    assert whole[:done] + block_keys(tokens[done * size :], size, "s", parent=parent) == whole


def test_salts_and_adapters_separate() -> None:
    tokens = list(range(4))
    chains = [
        block_keys(tokens, 4),
        block_keys(tokens, 4, "a"),
        block_keys(tokens, 4, "b"),
        block_keys(tokens, 4, "", "a"),
        block_keys(tokens, 4, "a", "b"),
        block_keys(tokens, 4, "a\x00lorab"[:1], "b\x00"),
    ]
    assert len({tuple(chain) for chain in chains}) == len(chains)


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_has_a_size(size: int) -> None:
    with pytest.raises(ValueError, match="block_size"):
        block_keys([1], size)


def test_any_sequence_of_ints_will_do() -> None:
    assert block_keys(range(8), 4) == block_keys(tuple(range(8)), 4) == block_keys(list(range(8)), 4)
    with pytest.raises(TypeError):
        block_keys([1.5], 1)  # type: ignore[list-item]
    with pytest.raises(OverflowError):
        block_keys([2**63], 1)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (v1_block_key([1, 2, 3, 4]), 924206229973855),
        (v1_block_key([5, 6, 7, 8], parent=924206229973855), 2728178455351807326),
        (v1_block_key([1, 2, 3, 4], lora_id=7), 1405807694910447675),
        (v1_block_key([1, 2, 3, 4], salt_id=9), 18027096437746983136),
        (v1_block_key(range(32)), 17461474797406555673),
    ],
)
def test_v1_keys_match_the_vectors(key: int, expected: int) -> None:
    assert key == expected


def test_v1_salt_counts_at_the_start_of_a_chain_alone() -> None:
    assert v1_block_key([1], parent=5, salt_id=9) == v1_block_key([1], parent=5)


@given(TOKENS, st.integers(0, 2**64 - 1), st.none() | st.integers(0, 2**63), st.none() | st.integers(0, 2**64 - 1))
def test_v1_keys_are_64_bits(tokens: list[int], parent: int, lora: int | None, salt: int | None) -> None:
    assert 0 <= v1_block_key(tokens, parent, lora, salt) < 2**64
