"""The cuBLASLt baselines: W8A8 with per-row scales, and dense FP16.

cuBLASLt can't apply the scales of W8A8: its int8 GEMMs output int32 without an epilogue, or int8
with a scale (cuBLAS 13 documentation, section cublasLtMatmul, tables of supported data types).
csrc/cublas/rows.cu therefore applies them in a separate kernel, with 16-byte loads and programmatic
dependent launch. `cublaslt-w8a8[sums]` is the GEMM alone: a lower bound for any such scaling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexq_bench.kernels.contract import (
    CheckedGemm,
    Config,
    GemmCall,
    KernelSpec,
    PackedOperand,
    Packing,
    checked_scales,
)
from flexq_bench.kernels.cuda.cublas.cublaslt import LtConfig, LtTypes, lt_candidates, lt_problem
from flexq_bench.kernels.cuda.cublas.rows import INT8_ROWS
from flexq_bench.kernels.cuda.half_activations import HalfActivationKernel
from flexq_bench.kernels.formats import FP16, NumberFormat, Operand
from flexq_bench.kernels.runtime.nvrtc import Build
from flexq_bench.workloads.gemm import GemmWorkload

INT8 = LtTypes(torch.int8, torch.int32)
_FP16 = LtTypes(torch.float16, torch.float16)
PADDED_ROWS = 16  # the largest padding of M that is tried; activations are allocated for it


class _LtGemm(CheckedGemm):
    """Common base of the cuBLASLt kernels: padding, candidates and the library call."""

    types: LtTypes
    k_multiple: int  # K is padded to it, so that every row is aligned

    def padded_k(self, k: int) -> int:
        return -(-k // self.k_multiple) * self.k_multiple

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        return lt_candidates(gemm, self.padded_k(gemm.k), self.types)

    def default_config(self, gemm: GemmWorkload) -> Config | None:
        return first_algorithm(gemm.m)

    def _multiply(
        self, shape: GemmWorkload, w: torch.Tensor, x: torch.Tensor, y: torch.Tensor, c: LtConfig
    ) -> None:
        problem = lt_problem(
            c.m_padded, shape.n, w.shape[1], self.types, torch.cuda.current_device()
        )
        problem.run(w, x, y, c.algorithm)

    def _config(self, shape: GemmWorkload, config: Config | None) -> LtConfig:
        return config if isinstance(config, LtConfig) else first_algorithm(shape.m)


def first_algorithm(m: int) -> LtConfig:
    """Return cuBLASLt's first algorithm by its heuristic, with m padded to at least PADDED_ROWS."""
    return LtConfig(algorithm=0, m_padded=max(m, PADDED_ROWS))


def padded(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Pad a matrix with zeros to [rows, columns]."""
    larger = torch.zeros(rows, columns, dtype=matrix.dtype, device=matrix.device)
    larger[: matrix.shape[0], : matrix.shape[1]] = matrix
    return larger


class Int8Gemm(_LtGemm):
    """`cublaslt-w8a8`: int8 GEMM by cuBLASLt, then one kernel that applies both scales."""

    types = INT8
    k_multiple = 16
    spec = KernelSpec(
        name="cublaslt-w8a8",
        backend="cuda",
        weight=NumberFormat(8),
        activation=NumberFormat(8),
        summary="cuBLASLt int8, timed algorithms, M padded where that is faster",
    )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        buffers = {
            "codes": padded(weight.values, weight.rows, self.padded_k(weight.k)),
            "scales": checked_scales(weight, self.spec.weight)[:, 0].contiguous(),
        }
        return PackedOperand(buffers, weight.rows, weight.k)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        rows = max(m, PADDED_ROWS)
        buffers = {
            "codes": torch.zeros(rows, self.padded_k(k), dtype=torch.int8, device=device),
            "scales": torch.empty(m, dtype=torch.float32, device=device),
        }
        return PackedOperand(buffers, m, k)

    def pack_activation(self, x: Operand) -> PackedOperand:
        packed = self.empty_activation(x.rows, x.k, x.values.device)
        packed.buffers["codes"][: x.rows, : x.k] = x.values
        packed.buffers["scales"].copy_(checked_scales(x, self.spec.activation)[:, 0])
        return packed

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        INT8_ROWS.quantize(x, packed.buffers["codes"], packed.buffers["scales"])

    def packing(self, x: PackedOperand, config: Config | None) -> Packing:
        codes, scales = x.buffers["codes"], x.buffers["scales"]
        return Packing("row-codes", self.spec.activation.bits, codes, scales)

    def builds(self) -> Sequence[Build]:
        return [INT8_ROWS.build]

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, shape = call
        chosen = self._config(shape, config)
        sums = torch.empty(chosen.m_padded, shape.n, dtype=torch.int32, device=out.device)
        self._multiply(shape, w.buffers["codes"], x.buffers["codes"], sums, chosen)
        INT8_ROWS.scale(sums, x.buffers["scales"], w.buffers["scales"], bias, out)


class Fp16Gemm(HalfActivationKernel, _LtGemm):
    """`cublas-fp16`: dense FP16 with FP32 accumulation, the fastest of cuBLASLt's algorithms."""

    types = _FP16
    k_multiple = 8
    min_rows = PADDED_ROWS
    spec = KernelSpec(
        name="cublas-fp16",
        backend="cuda",
        weight=FP16,
        activation=FP16,
        summary="cuBLASLt FP16, timed algorithms",
    )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        values = padded(weight.values, weight.rows, self.padded_k(weight.k))
        return PackedOperand({"values": values}, weight.rows, weight.k)

    def packing(self, x: PackedOperand, config: Config | None) -> Packing:
        return Packing("halves", 16, x.buffers["values"])

    def linear(
        self,
        x: torch.Tensor,
        packed: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> torch.Tensor | None:
        """Run `activate` and `gemm`; activations in the library's layout are not copied."""
        chosen = config or self.default_config(GemmWorkload(packed.rows, w.rows, packed.k))
        pads = isinstance(chosen, LtConfig) and chosen.m_padded != packed.rows
        if pads:
            self.activate(x, packed)
        else:
            packed = self.activated(x, packed)
        return self.gemm(packed, w, out, bias=bias, config=chosen)

    def compute(self, call: GemmCall, config: Config | None) -> torch.Tensor | None:
        x, w, out, bias, shape = call
        chosen = self._config(shape, config)
        y = out
        if chosen.m_padded != shape.m:
            y = torch.empty(chosen.m_padded, shape.n, dtype=torch.float16, device=out.device)
        self._multiply(shape, w.buffers["values"], x.buffers["values"], y, chosen)
        if y is not out:
            out.copy_(y[: shape.m])
        if bias is not None:
            out += bias
        return None
