"""cuBLASLt GEMMs through nvmath's bindings, with the algorithms of its heuristic as candidates.

Y[M,N] row-major is Y^T column-major, so cuBLASLt computes Y^T = W · X^T: the "TN" layout, the only
one that its int8 kernels support.
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.errors import KernelError, UnsupportedError
from flexq_bench.workloads.gemm import GemmWorkload

# cudaDataType and cublasComputeType values (CUDA library_types.h, cublas_api.h)
_CUDA_TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.int8: 3,
    torch.int32: 10,
    torch.float8_e4m3fn: 28,
}
_COMPUTE_32F, _COMPUTE_32I = 68, 72
_TRANSPOSE = 1
_SCALE_PER_ROW = 3  # CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
# Split-K in place or in the compute type. Summing partial results in the output type (4) would be
# FP16 sums: 4 units in the last place off at K = 4096.
_EXACT_REDUCTIONS = 1 | 2
_REQUESTED = 16  # algorithms of the heuristic; later ones were never the fastest
WORKSPACE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class LtConfig(Config):
    """algorithm: index in the heuristic's list; m_padded: rows of X, padded, of the call."""

    algorithm: int
    m_padded: int


@dataclass(frozen=True, slots=True)
class LtTypes:
    """Data types of a GEMM: of its inputs and its output.

    row_scales: the library multiplies by FP32 scales per row of W and of X, which it supports for
    FP8 on compute capability 9.0 from version 12.9 on. Sums of int8 are int32, or int8 with a
    scale, never FP16 or FP32 (cuBLAS 13 documentation, table of cublasLtMatmul).
    """

    inputs: torch.dtype
    output: torch.dtype
    row_scales: bool = False


class LtProblem:
    """Descriptors and algorithms of one shape and one LtTypes on the current device."""

    def __init__(self, m: int, n: int, k: int, types: LtTypes) -> None:
        lt = bindings()
        compute = _COMPUTE_32I if types.inputs == torch.int8 else _COMPUTE_32F
        # The type of alpha and beta is int32 for int32 output, else FP32.
        integer_output = types.output == torch.int32
        scale = _CUDA_TYPES[torch.int32 if integer_output else torch.float32]
        self._lt = lt
        self._desc = lt.matmul_desc_create(compute, scale)
        attributes = lt.MatmulDescAttribute
        self._set(attributes.TRANSA, ctypes.c_int32(_TRANSPOSE))
        if types.row_scales:
            self._set(attributes.A_SCALE_MODE, ctypes.c_int32(_SCALE_PER_ROW))
            self._set(attributes.B_SCALE_MODE, ctypes.c_int32(_SCALE_PER_ROW))
            # The heuristic requires scale pointers, but does not read the scales.
            placeholder = workspace(torch.cuda.current_device())
            self._set_scales(placeholder, placeholder)
        inputs, output = _CUDA_TYPES[types.inputs], _CUDA_TYPES[types.output]
        self._w = lt.matrix_layout_create(inputs, k, n, k)
        self._x = lt.matrix_layout_create(inputs, k, m, k)
        self._y = lt.matrix_layout_create(output, n, m, n)
        number = ctypes.c_int32 if integer_output else ctypes.c_float
        self._one, self._zero = number(1), number(0)
        self._algorithms, self.count = self._query_heuristic()

    def _set(self, attribute: Any, value: Any) -> None:
        self._lt.matmul_desc_set_attribute(
            self._desc, attribute, ctypes.addressof(value), ctypes.sizeof(value)
        )

    def _set_scales(self, w_scales: torch.Tensor, x_scales: torch.Tensor) -> None:
        attributes = self._lt.MatmulDescAttribute
        self._set(attributes.A_SCALE_POINTER, ctypes.c_void_p(w_scales.data_ptr()))
        self._set(attributes.B_SCALE_POINTER, ctypes.c_void_p(x_scales.data_ptr()))

    # The algorithm is the first field of a result, so both have the same address.
    def _query_heuristic(self) -> tuple[np.ndarray[Any, Any], int]:
        lt = self._lt
        preference = lt.matmul_preference_create()
        size, reductions = ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_uint32(_EXACT_REDUCTIONS)
        attributes = lt.MatmulPreferenceAttribute
        for attribute, value in (
            (attributes.MAX_WORKSPACE_BYTES, size),
            (attributes.REDUCTION_SCHEME_MASK, reductions),
        ):
            lt.matmul_preference_set_attribute(
                preference, attribute, ctypes.addressof(value), ctypes.sizeof(value)
            )
        results = np.zeros(_REQUESTED, dtype=lt.matmul_heuristic_result_dtype)
        count = ctypes.c_int32(0)
        try:
            lt.matmul_algo_get_heuristic(
                _handle(torch.cuda.current_device()),
                self._desc,
                self._w,
                self._x,
                self._y,
                self._y,
                preference,
                _REQUESTED,
                results.ctypes.data,
                ctypes.addressof(count),
            )
        finally:
            lt.matmul_preference_destroy(preference)
        if count.value == 0:
            raise UnsupportedError("cuBLASLt has no algorithm for this shape and type")
        return results, count.value

    def run(
        self,
        w: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        algorithm: int,
        *,
        w_scales: torch.Tensor | None = None,
        x_scales: torch.Tensor | None = None,
    ) -> None:
        """Compute y = x · w^T on the current stream. algorithm: index in the heuristic's list.

        w_scales, x_scales: FP32 [N] and [M], for types with row_scales.
        """
        if w_scales is not None and x_scales is not None:
            self._set_scales(w_scales, x_scales)
        device = torch.cuda.current_device()
        stream = torch.cuda.current_stream().cuda_stream
        self._lt.matmul(
            _handle(device),
            self._desc,
            ctypes.addressof(self._one),
            w.data_ptr(),
            self._w,
            x.data_ptr(),
            self._x,
            ctypes.addressof(self._zero),
            y.data_ptr(),
            self._y,
            y.data_ptr(),
            self._y,
            self._algorithms.ctypes.data + algorithm * self._algorithms.itemsize,
            workspace(device).data_ptr(),
            WORKSPACE_BYTES,
            stream,
        )


@cache
def lt_problem(m: int, n: int, k: int, types: LtTypes, device: int) -> LtProblem:
    """Return the descriptors of a shape on a device; cached."""
    if device != torch.cuda.current_device():
        raise KernelError(f"device {device} is not the current one")
    return LtProblem(m, n, k, types)


def lt_candidates(gemm: GemmWorkload, k_padded: int, types: LtTypes) -> list[LtConfig]:
    """Return every algorithm for M without padding and, for small M, padded to 8 and 16.

    gemm.n: rows of W of the call. Padding can be faster: the int8 kernels for M < 8 were slower
    than those for 8 or 16.
    """
    device = torch.cuda.current_device()
    paddings = sorted({max(gemm.m, p) for p in (1, 8, 16)})
    configs: list[LtConfig] = []
    for m_padded in paddings:
        try:
            count = lt_problem(m_padded, gemm.n, k_padded, types, device).count
        except (UnsupportedError, bindings().cuBLASLtError):
            continue  # no kernel for this padding; there may be one for the next
        configs += [LtConfig(algorithm, m_padded) for algorithm in range(count)]
    return configs


def lt_version() -> tuple[int, int]:
    """Return the major and minor version of the loaded library, for example (12, 9)."""
    number = int(bindings().get_version())
    major = number // 10000
    return major, number % 10000 // 100


@cache
def bindings(library: str = "cublasLt") -> Any:
    """Import nvmath's bindings of a library. Raises UnsupportedError if they are missing."""
    try:
        return importlib.import_module(f"nvmath.bindings.{library}")
    except ImportError as error:
        raise UnsupportedError(
            f"{library} needs nvmath-python: pip install 'flexq-bench[cuda13]' (or [cuda12])"
        ) from error


@cache
def _handle(device: int) -> int:
    handle: int = bindings().create()
    return handle


@cache
def workspace(device: int) -> torch.Tensor:
    """Return WORKSPACE_BYTES of a GPU's memory, for calls on one stream."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
