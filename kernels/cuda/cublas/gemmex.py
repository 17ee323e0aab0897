"""int8 by cublasGemmEx, called as the FlexQ authors' benchmark calls it.

Their engine/test_cublas_kernel.cu (github.com/FlyFoxPlayer/FlexQ) multiplies row-major X [M,K] by
row-major W^T [K,N]: column-major "NN", M unpadded, CUBLAS_COMPUTE_32I, int32 output and
CUBLAS_GEMM_DEFAULT_TENSOR_OP. It times 1,000 consecutive calls on the same operands and applies no
scales. cuBLAS's int8 tensor-core kernels support only "TN" (cuBLAS 13 documentation,
cublasLtMatmul), so this call runs other kernels than `cublaslt-w8a8`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from flexq_bench.kernels.contract import (
    CheckedGemm,
    Config,
    GemmCall,
    KernelSpec,
    PackedOperand,
    checked_scales,
)
from flexq_bench.kernels.cuda.cublas.cublaslt import WORKSPACE_BYTES, bindings, workspace
from flexq_bench.kernels.cuda.cublas.dense import padded
from flexq_bench.kernels.cuda.cublas.rows import INT8_ROWS
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.runtime.nvrtc import Build

_MULTIPLE = 4  # of both leading dimensions, required by cublasGemmEx for int8
_INT8, _INT32 = 3, 10  # CUDA_R_8I, CUDA_R_32I
_COMPUTE_32I, _DEFAULT_TENSOR_OP = 72, 99
_NOT_TRANSPOSED = 0


def padded_size(size: int) -> int:
    """Round up to a multiple of four."""
    return -(-size // _MULTIPLE) * _MULTIPLE


def transposed_codes(codes: torch.Tensor) -> torch.Tensor:
    """Transpose W int8 [N,K] to row-major [K,N], both zero-padded to a multiple of four."""
    n, k = codes.shape
    return padded(codes.T, padded_size(k), padded_size(n))


def padded_tokens(codes: torch.Tensor) -> torch.Tensor:
    """Pad K of X int8 [M,K] with zeros to a multiple of four."""
    m, k = codes.shape
    return padded(codes, m, padded_size(k))


def multiply_int8(x: torch.Tensor, w: torch.Tensor, sums: torch.Tensor) -> None:
    """Compute sums int32 [M,N] = x int8 [M,K] · w int8 [K,N], row-major, on the current stream.

    Raises UnsupportedError if the library has no kernel for the shape.
    """
    (m, k), n = x.shape, w.shape[1]
    device = torch.cuda.current_device()
    cublas, handle = bindings("cublas"), _handle(device)
    cublas.set_stream(handle, torch.cuda.current_stream().cuda_stream)
    # set_stream resets it
    cublas.set_workspace(handle, workspace(device).data_ptr(), WORKSPACE_BYTES)
    one, zero = ctypes.c_int32(1), ctypes.c_int32(0)
    try:
        cublas.gemm_ex(
            handle,
            _NOT_TRANSPOSED,
            _NOT_TRANSPOSED,
            n,
            m,
            k,
            ctypes.addressof(one),
            w.data_ptr(),
            _INT8,
            n,
            x.data_ptr(),
            _INT8,
            k,
            ctypes.addressof(zero),
            sums.data_ptr(),
            _INT32,
            n,
            _COMPUTE_32I,
            _DEFAULT_TENSOR_OP,
        )
    except cublas.cuBLASError as error:
        raise UnsupportedError(
            f"cublasGemmEx has no int8 kernel for M={m} N={n} K={k} ({error}): use cublaslt-w8a8"
        ) from error


class GemmExGemm(CheckedGemm):
    """`cublas-w8a8[gemmex]`: the authors' call, then the kernel that applies both scales."""

    spec = KernelSpec(
        name="cublas-w8a8",
        variant="gemmex",
        backend="cuda",
        weight=NumberFormat(8),
        activation=NumberFormat(8),
        summary="cublasGemmEx int8 as FlexQ's authors call it, plus scales, which they leave out",
    )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        buffers = {
            "codes": transposed_codes(weight.values),
            "scales": checked_scales(weight, self.spec.weight)[:, 0].contiguous(),
        }
        return PackedOperand(buffers, weight.rows, weight.k)

    def pack_activation(self, x: Operand) -> PackedOperand:
        buffers = {
            "codes": padded_tokens(x.values),
            "scales": checked_scales(x, self.spec.activation)[:, 0].float(),
        }
        return PackedOperand(buffers, x.rows, x.k)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        buffers = {
            "codes": torch.empty(m, padded_size(k), dtype=torch.int8, device=device),
            "scales": torch.empty(m, dtype=torch.float32, device=device),
        }
        return PackedOperand(buffers, m, k)

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        INT8_ROWS.quantize(x, packed.buffers["codes"], packed.buffers["scales"])

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, shape = call
        codes = w.buffers["codes"]
        sums = torch.empty(shape.m, codes.shape[1], dtype=torch.int32, device=out.device)
        multiply_int8(x.buffers["codes"], codes, sums)
        INT8_ROWS.scale(sums, x.buffers["scales"], w.buffers["scales"], bias, out)

    def builds(self) -> Sequence[Build]:
        return [INT8_ROWS.build]


@cache
def _handle(device: int) -> int:
    handle: int = bindings("cublas").create()
    return handle
