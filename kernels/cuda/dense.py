"""The cuBLASLt baselines: W8A8 with per-row scales, and dense FP16."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.contract import (
    Config,
    KernelSpec,
    LinearKernel,
    OperandFormat,
    PackedOperand,
    check_gemm,
    checked_scales,
)
from kernels.cuda.cublaslt import LtConfig, LtTypes, lt_candidates, lt_problem
from kernels.formats import Operand
from kernels.runtime.module import load_function
from kernels.runtime.nvrtc import Build
from workloads.gemm import GemmWorkload

_INT8 = LtTypes(torch.int8, torch.int32)
_FP16 = LtTypes(torch.float16, torch.float16)
_SCALING = Build.of("w8a8.cu")
_THREADS, _ROW_THREADS = 256, 1024  # of scale_sums and quantize_rows in csrc/w8a8.cu
_PADDED_ROWS = 16  # activations are allocated for the largest padding that is ever tried


class _LtGemm(LinearKernel):
    """What both have in common: padding, candidates and the library call."""

    types: LtTypes
    k_multiple: int  # of K in memory, so that every row starts where the library wants it

    def _padded_k(self, k: int) -> int:
        return -(-k // self.k_multiple) * self.k_multiple

    def _padded(self, matrix: torch.Tensor, rows: int) -> torch.Tensor:
        """matrix [r, k] in a zeroed [rows, padded k]."""
        padded = torch.zeros(
            rows, self._padded_k(matrix.shape[1]), dtype=matrix.dtype, device=matrix.device
        )
        padded[: matrix.shape[0], : matrix.shape[1]] = matrix
        return padded

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        return lt_candidates(gemm, self._padded_k(gemm.k), self.types)

    def default_config(self, gemm: GemmWorkload) -> LtConfig:
        return LtConfig(algorithm=0, m_padded=max(gemm.m, _PADDED_ROWS))

    def _multiply(
        self, shape: GemmWorkload, w: torch.Tensor, x: torch.Tensor, y: torch.Tensor, c: LtConfig
    ) -> None:
        problem = lt_problem(
            c.m_padded, shape.n, w.shape[1], self.types, torch.cuda.current_device()
        )
        problem.run(w, x, y, c.algorithm)

    def _config(self, shape: GemmWorkload, config: Config | None) -> LtConfig:
        return config if isinstance(config, LtConfig) else self.default_config(shape)


class Int8Gemm(_LtGemm):
    """`cublaslt-w8a8`: int8 GEMM by cuBLASLt, then one kernel that applies both scales."""

    types = _INT8
    k_multiple = 16
    spec = KernelSpec(
        name="cublaslt-w8a8",
        backend="cuda",
        weight=OperandFormat(8),
        activation=OperandFormat(8),
        summary="cuBLASLt int8, timed algorithms, M padded where that is faster",
    )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        buffers = {
            "codes": self._padded(weight.values, weight.rows),
            "scales": checked_scales(weight, self.spec.weight)[:, 0].contiguous(),
        }
        return PackedOperand(buffers, weight.rows, weight.k)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        rows = max(m, _PADDED_ROWS)
        buffers = {
            "codes": torch.zeros(rows, self._padded_k(k), dtype=torch.int8, device=device),
            "scales": torch.empty(m, dtype=torch.float32, device=device),
        }
        return PackedOperand(buffers, m, k)

    def pack_activation(self, x: Operand) -> PackedOperand:
        packed = self.empty_activation(x.rows, x.k, x.values.device)
        packed.buffers["codes"][: x.rows, : x.k] = x.values
        packed.buffers["scales"].copy_(checked_scales(x, self.spec.activation)[:, 0])
        return packed

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        function = load_function(_SCALING, "quantize_rows")
        codes, scales = packed.buffers["codes"], packed.buffers["scales"]
        arguments = (x.contiguous(), codes, scales, packed.k, codes.shape[1])
        function.launch((packed.rows, 1, 1), _ROW_THREADS, arguments, overlap_previous=True)

    def builds(self) -> Sequence[Build]:
        return [_SCALING]

    def gemm(
        self,
        x: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> None:
        shape = check_gemm(x, w, out)
        chosen = self._config(shape, config)
        sums = torch.empty(chosen.m_padded, shape.n, dtype=torch.int32, device=out.device)
        self._multiply(shape, w.buffers["codes"], x.buffers["codes"], sums, chosen)
        function = load_function(_SCALING, "scale_sums")
        arguments = (sums, x.buffers["scales"], w.buffers["scales"], bias, out, shape.n)
        grid = (-(-shape.n // _THREADS), shape.m, 1)
        function.launch(grid, _THREADS, arguments, overlap_previous=True)


class Fp16Gemm(_LtGemm):
    """`cublas-fp16`: dense FP16 with FP32 accumulation, the fastest of cuBLASLt's algorithms."""

    types = _FP16
    k_multiple = 8
    spec = KernelSpec(
        name="cublas-fp16",
        backend="cuda",
        weight=OperandFormat(16),
        activation=OperandFormat(16),
        summary="cuBLASLt FP16, timed algorithms",
    )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        values = self._padded(weight.values, weight.rows)
        return PackedOperand({"values": values}, weight.rows, weight.k)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        rows = max(m, _PADDED_ROWS)
        values = torch.zeros(rows, self._padded_k(k), dtype=torch.float16, device=device)
        return PackedOperand({"values": values}, m, k)

    def pack_activation(self, x: Operand) -> PackedOperand:
        packed = self.empty_activation(x.rows, x.k, x.values.device)
        self.activate(x.values, packed)
        return packed

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        packed.buffers["values"][: packed.rows, : packed.k] = x

    def gemm(
        self,
        x: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> None:
        shape = check_gemm(x, w, out)
        chosen = self._config(shape, config)
        y = out
        if chosen.m_padded != shape.m:
            y = torch.empty(chosen.m_padded, shape.n, dtype=torch.float16, device=out.device)
        self._multiply(shape, w.buffers["values"], x.buffers["values"], y, chosen)
        if y is not out:
            out.copy_(y[: shape.m])
        if bias is not None:
            out += bias
