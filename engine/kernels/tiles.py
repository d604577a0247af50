"""Which product of a decode step runs as our kernel, and cut up how: measured on an H200 with an 8B-shaped model.

None stands for cuBLAS. `bench/gpu/gpu_tune.py` measures the table again.
"""

from __future__ import annotations

import enum

from engine.kernels.linear import Tile


class Product(enum.Enum):
    QKV = "qkv"
    OUTPUT = "output"
    GATE_UP = "gate_up"
    DOWN = "down"
    HEAD = "head"


ROWS = (1, 32, 64, 128)
"""A product of M rows takes the entry of the first count that holds them; more rows go to cuBLAS."""

TILES: dict[tuple[Product, int], Tile | None] = {
    (Product.QKV, 1): Tile(16, 512, 1, 8, 1, 512),
    (Product.OUTPUT, 1): Tile(8, 512, 1, 8, 2, 512),
    (Product.GATE_UP, 1): Tile(4, 512, 1, 4, 1, 512),
    (Product.DOWN, 1): Tile(8, 512, 1, 8, 2, 512),
    (Product.HEAD, 1): Tile(8, 512, 1, 8, 2, 512),
    (Product.QKV, 32): Tile(64, 128, 1, 4, 6, norms=False),
    (Product.OUTPUT, 32): Tile(64, 128, 2, 4, 6),
    (Product.GATE_UP, 32): Tile(128, 128, 1, 8, 3, norms=False),
    (Product.DOWN, 32): Tile(64, 128, 2, 4, 6),
    (Product.HEAD, 32): Tile(64, 128, 1, 4, 3, norms=False),
    (Product.QKV, 64): Tile(64, 128, 1, 4, 6, norms=False),
    (Product.OUTPUT, 64): None,
    (Product.GATE_UP, 64): Tile(128, 64, 1, 8, 4, norms=False),
    (Product.DOWN, 64): Tile(64, 128, 2, 4, 6, 512),
    (Product.HEAD, 64): Tile(128, 128, 1, 8, 4, norms=False),
    (Product.QKV, 128): None,
    (Product.OUTPUT, 128): None,
    (Product.GATE_UP, 128): Tile(128, 64, 1, 8, 4, 256, norms=False),
    (Product.DOWN, 128): None,
    (Product.HEAD, 128): Tile(128, 64, 1, 8, 3, norms=False),
}


def tile_for(product: Product, rows: int) -> Tile | None:
    for count in ROWS:
        if rows <= count:
            return TILES.get((product, count))
    return None
