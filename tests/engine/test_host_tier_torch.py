from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch

from engine.blocks import BlockPool
from engine.host_tier_torch import tensor_tier
from kvstore.hashing import block_keys

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
SHAPE = (3, 2, 4, 2, 8)


def test_a_tier_too_small_for_one_block_is_none() -> None:
    assert tensor_tier(10, torch.zeros(2, 8)) is None


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_come_back_as_they_were(device: str, dtype: torch.dtype) -> None:
    """Random use of eight chains of four blocks over a pool of six blocks and twenty places."""
    rng = random.Random(5)
    stream = torch.cuda.Stream() if device == "cuda" else None
    blocks = torch.zeros(6, *SHAPE, dtype=dtype, device=device)
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    on_stream = (lambda: torch.cuda.stream(stream)) if stream is not None else nullcontext
    size = 20 * blocks[0].numel() * blocks.element_size()
    tier = tensor_tier(size, blocks, on_stream)
    assert tier is not None and tier.num_blocks == 20
    pool = BlockPool(6, host=tier)
    chains = [block_keys([chain, *range(3)], 1) for chain in range(8)]
    for _ in range(200):
        number = rng.randrange(8)
        keys = chains[number][: rng.randrange(1, 5)]
        found = pool.match(keys)
        pool.reserve(len(keys) - sum(block is not None for block in found))
        table = pool.claim(keys[: len(found)], found)
        with on_stream():
            for index, block in enumerate(table):
                assert bool((blocks[block] == float(number * 4 + index)).all())
            for index in range(len(table), len(keys)):
                [block] = pool.allocate(1)
                blocks[block] = float(number * 4 + index)
                pool.register(block, keys[index])
                table.append(block)
        pool.release(table)
    assert tier.onboarded > 50
