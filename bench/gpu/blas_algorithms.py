"""cuBLASLt's own list of algorithms for a product, each of them timed: what its first choice leaves on the table."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

_COMPUTE_32F, _R_32F, _R_16BF, _TRANSPOSE = 68, 0, 14, 1
_DESC_TRANSA, _PREFERENCE_WORKSPACE = 3, 1
_WORKSPACE = 64 << 20


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclasses.dataclass(slots=True)
class _Plan:
    descriptor: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]  # of weight, x and out
    algorithm: _Heuristic


class Algorithms:
    """bfloat16 products x [M, K] @ weight [N, K].T, by the fastest algorithm found for (M, N, K, added)."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcublasLt.so.13")
        self._handle = ctypes.c_void_p()
        self._ok(self._lib.cublasLtCreate(ctypes.byref(self._handle)))
        self._workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device="cuda")
        self._plans: dict[tuple[int, int, int, bool], _Plan] = {}

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: None = None) -> torch.Tensor:
        out = x.new_empty(x.shape[0], weight.shape[0])
        self._launch(self._plans[(*x.shape, weight.shape[0], False)], x, weight, out, 0.0)
        return out

    def add(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: None = None) -> None:
        self._launch(self._plans[(*x.shape, weight.shape[0], True)], x, weight, out, 1.0)

    def tune(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], added: bool, time: Callable[[Callable[[], None]], float]
    ) -> list[tuple[float, float, int]]:
        """(seconds a product, waves, place in cuBLASLt's order) of each algorithm, the fastest first, which is kept.
        `time` gives the seconds of a run over all `weights`."""
        (m, k), n = x.shape, weights[0].shape[0]
        out = torch.zeros(m, n, dtype=x.dtype, device=x.device)
        found = []
        for place, plan in enumerate(self._offered(m, n, k)):

            def run(plan: _Plan = plan) -> None:
                for weight in weights:
                    self._launch(plan, x, weight, out, 1.0 if added else 0.0)

            try:
                found.append((time(run) / len(weights), plan.algorithm.waves, place, plan))
            except RuntimeError as error:  # offered, but it does not run here
                print("algorithm", place, error)
        found.sort(key=lambda each: each[0])
        self._plans[m, k, n, added] = found[0][3]
        return [each[:3] for each in found]

    def _offered(self, m: int, n: int, k: int, count: int = 16) -> list[_Plan]:
        lib, ref = self._lib, ctypes.byref
        descriptor, preference = ctypes.c_void_p(), ctypes.c_void_p()
        self._ok(lib.cublasLtMatmulDescCreate(ref(descriptor), _COMPUTE_32F, _R_32F))
        turn, workspace = ctypes.c_int32(_TRANSPOSE), ctypes.c_size_t(_WORKSPACE)
        self._ok(lib.cublasLtMatmulDescSetAttribute(descriptor, _DESC_TRANSA, ref(turn), ctypes.c_size_t(4)))
        weight, x, out = (self._layout(*shape) for shape in ((k, n), (k, m), (n, m)))
        self._ok(lib.cublasLtMatmulPreferenceCreate(ref(preference)))
        self._ok(
            lib.cublasLtMatmulPreferenceSetAttribute(
                preference, _PREFERENCE_WORKSPACE, ref(workspace), ctypes.c_size_t(8)
            )
        )
        results, returned = (_Heuristic * count)(), ctypes.c_int()
        self._ok(
            lib.cublasLtMatmulAlgoGetHeuristic(
                self._handle, descriptor, weight, x, out, out, preference, count, results, ref(returned)
            )
        )
        return [_Plan(descriptor, (weight, x, out), each) for each in results[: returned.value] if not each.state]

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        """A matrix whose columns lie one behind another: a row-major tensor is its transpose."""
        layout = ctypes.c_void_p()
        self._ok(
            self._lib.cublasLtMatrixLayoutCreate(
                ctypes.byref(layout), _R_16BF, ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
            )
        )
        return layout

    def _launch(self, plan: _Plan, x: Any, weight: Any, out: Any, beta: float) -> None:
        pointer, ref = ctypes.c_void_p, ctypes.byref
        of_weight, of_x, of_out = plan.layouts
        self._ok(
            self._lib.cublasLtMatmul(
                self._handle, plan.descriptor, ref(ctypes.c_float(1.0)), pointer(weight.data_ptr()), of_weight,
                pointer(x.data_ptr()), of_x, ref(ctypes.c_float(beta)), pointer(out.data_ptr()), of_out,
                pointer(out.data_ptr()), of_out, ref(plan.algorithm.algorithm),
                pointer(self._workspace.data_ptr()), ctypes.c_size_t(_WORKSPACE),
                pointer(torch.cuda.current_stream().cuda_stream),
            )
        )  # fmt: skip

    @staticmethod
    def _ok(status: int) -> None:
        if status:
            raise RuntimeError(f"cuBLASLt: status {status}")
