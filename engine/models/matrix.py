"""The forms in which a weight matrix is kept on the CPU, and the product with each.

`plain` is a tensor [in, out]. `packed` is oneDNN's blocked order: the same numbers, as fast at one row, and from four
rows up 2 to 3 times as fast as torch's own product where the CPU has AVX-512. `int8` rounds weights to 8 bits a number
and the rows they meet as well: a quarter of the memory, 2 to 6 times as fast again, about 1 % off in each product. With
the packed and the int8 form a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

_ROWS_HINT = 16
"""Rows that the blocked order is chosen for; it serves every other count too."""

_SAME_ORDER = 1024
"""Up to this many numbers oneDNN adds a product's terms in one order for every count of rows; beyond, a single row has
an order of its own, and two rows cost the same."""


class PreparedMatrix(Protocol):
    """A matrix in a form that only its own product reads."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] to [T, out]."""

    def add_product(self, x: torch.Tensor, bias: torch.Tensor | None, base: torch.Tensor) -> torch.Tensor:
        """base [T, out] + multiply(x, bias)."""


Matrix = torch.Tensor | PreparedMatrix
MatrixForm = Callable[[torch.Tensor], Matrix]
"""From a weight [out, in], as checkpoints have it, to the form in which it is kept."""


def multiply(x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, in] times a matrix, plus a bias [out]."""
    if not isinstance(matrix, torch.Tensor):
        return matrix.multiply(x, bias)
    return x @ matrix if bias is None else torch.addmm(bias, x, matrix)


def add_product(x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, base: torch.Tensor) -> torch.Tensor:
    """base + x times a matrix + bias."""
    if not isinstance(matrix, torch.Tensor):
        return matrix.add_product(x, bias, base)
    return base + multiply(x, matrix, bias)


def plain(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().contiguous()


class PackedMatrix:
    """oneDNN's blocked order, float32 or bfloat16."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        self._lone_rows_differ = weight.shape[1] > _SAME_ORDER

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._lone_rows_differ and x.shape[0] == 1:
            return self.multiply(x.repeat(2, 1), bias)[:1]
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return result

    def add_product(self, x: torch.Tensor, bias: torch.Tensor | None, base: torch.Tensor) -> torch.Tensor:
        if self._lone_rows_differ and x.shape[0] == 1:
            return base + self.multiply(x, bias)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, base, self._packed, bias, "add")
        return result


class Int8Matrix:
    """Weights with one scale an output, rows with one scale each; sums in int32."""

    def __init__(self, weight: torch.Tensor) -> None:
        weight = weight.float()
        scales = (weight.abs().amax(1) / 127).clamp_min(1e-12)
        zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
        with warnings.catch_warnings():  # torch announces that its quantised tensors will move to another package
            warnings.simplefilter("ignore")
            rounded = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(rounded, None)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # Brought to [-1, 1] row by row: a scale over the whole batch would let the rows touch each other.
        peak = x.abs().amax(-1, keepdim=True).clamp_min(1e-12).float()
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        result: torch.Tensor = product(x / peak, 1 / 127, 128, self._packed).mul_(peak).to(x.dtype)
        return result if bias is None else result + bias

    def add_product(self, x: torch.Tensor, bias: torch.Tensor | None, base: torch.Tensor) -> torch.Tensor:
        return base + self.multiply(x, bias)


def can_pack(dtype: torch.dtype) -> bool:
    """oneDNN is there and computes in `dtype`. Its operators for packed weights are those that torch.compile uses."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def cpu_form(weight_dtype: str, dtype: torch.dtype) -> MatrixForm:
    """The form for `weight_dtype`: "int8", or anything else for the compute dtype `dtype`."""
    if weight_dtype == "int8":
        return Int8Matrix
    return PackedMatrix if can_pack(dtype) else plain


def bfloat16_is_fast(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """The CPU multiplies bfloat16 itself. Without that, bfloat16 is slower than float32 from two rows up."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags.split())
