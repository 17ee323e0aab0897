"""The cuBLASLt FP8 baseline: E4M3 weights and activations, one scale per row of each.

There are two ways to scale: cuBLASLt multiplies by both vectors of scales (compute capability 9.0,
version 12.9 and later: "outer vector scaling" in the cuBLAS 13 documentation, section on narrow
precision), or csrc/cublas/rows.cu scales the FP32 sums of the GEMM. Both are timed where available.

Fast accumulation is off, the library's default: with it, partial sums are not promoted to FP32 on
Hopper. Even without it sums have fewer bits than FP32 (kernels/reference.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from flexq_bench.kernels.contract import (
    CheckedGemm,
    Config,
    GemmCall,
    KernelSpec,
    PackedOperand,
    checked_scales,
)
from flexq_bench.kernels.cuda.cublas.cublaslt import LtTypes, lt_candidates, lt_problem, lt_version
from flexq_bench.kernels.cuda.cublas.dense import PADDED_ROWS, padded
from flexq_bench.kernels.cuda.cublas.rows import FP8_ROWS
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.runtime.gpu import current_gpu
from flexq_bench.kernels.runtime.nvrtc import Build
from flexq_bench.workloads.gemm import GemmWorkload

Scaling = Literal["fused", "after"]
_TYPES: dict[Scaling, LtTypes] = {
    "fused": LtTypes(torch.float8_e4m3fn, torch.float16, row_scales=True),
    "after": LtTypes(torch.float8_e4m3fn, torch.float32),
}
_MULTIPLE = 16  # of N and K, required by the library's FP8 kernels
_FUSED_CAPABILITY, _FUSED_VERSION = (9, 0), (12, 9)  # compute capability, version of cuBLASLt


@dataclass(frozen=True, slots=True)
class Fp8Config(Config):
    """algorithm, m_padded: as in LtConfig; scaling: in the GEMM, or by a kernel after it."""

    algorithm: int
    m_padded: int
    scaling: Scaling


class Fp8Gemm(CheckedGemm):
    """`cublaslt-fp8`."""

    spec = KernelSpec(
        name="cublaslt-fp8",
        backend="cuda",
        weight=NumberFormat(8, kind="float"),
        activation=NumberFormat(8, kind="float"),
        summary="cuBLASLt FP8 (E4M3), timed algorithms, scales fused or after the GEMM",
        min_capability=(8, 9),
    )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        scales = checked_scales(weight, self.spec.weight)[:, 0].contiguous()
        rows = _multiple(weight.rows)
        buffers = {
            "codes": padded(weight.values.view(torch.uint8), rows, _multiple(weight.k)),
            "scales": scales,
            "wide_scales": padded(scales.float()[None], 1, rows)[0],  # for the library
        }
        return PackedOperand(buffers, weight.rows, weight.k)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        rows = max(m, PADDED_ROWS)
        codes = torch.zeros(rows, _multiple(k), dtype=torch.uint8, device=device)
        scales = torch.zeros(rows, dtype=torch.float32, device=device)
        return PackedOperand({"codes": codes, "scales": scales}, m, k)

    def pack_activation(self, x: Operand) -> PackedOperand:
        packed = self.empty_activation(x.rows, x.k, x.values.device)
        packed.buffers["codes"][: x.rows, : x.k] = x.values.view(torch.uint8)
        packed.buffers["scales"][: x.rows] = checked_scales(x, self.spec.activation)[:, 0]
        return packed

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        FP8_ROWS.quantize(x, packed.buffers["codes"], packed.buffers["scales"])

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, shape = call
        chosen = config if isinstance(config, Fp8Config) else self.default_config(shape)
        types, n, k = _TYPES[chosen.scaling], _multiple(shape.n), _multiple(shape.k)
        problem = lt_problem(chosen.m_padded, n, k, types, torch.cuda.current_device())
        w_codes, x_codes = w.buffers["codes"], x.buffers["codes"]
        x_scales = x.buffers["scales"]
        y = out
        if types.output != out.dtype or (chosen.m_padded, n) != (shape.m, shape.n):
            y = torch.empty(chosen.m_padded, n, dtype=types.output, device=out.device)
        if chosen.scaling == "after":
            problem.run(w_codes, x_codes, y, chosen.algorithm)
            FP8_ROWS.scale(y, x_scales, w.buffers["scales"], bias, out)
            return
        w_scales = w.buffers["wide_scales"]
        problem.run(w_codes, x_codes, y, chosen.algorithm, w_scales=w_scales, x_scales=x_scales)
        if y is not out:
            out.copy_(y[: shape.m, : shape.n])
        if bias is not None:
            out += bias

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        padded_gemm = GemmWorkload(gemm.m, _multiple(gemm.n), gemm.k)
        return [
            Fp8Config(c.algorithm, c.m_padded, scaling)
            for scaling in _scalings()
            for c in lt_candidates(padded_gemm, _multiple(gemm.k), _TYPES[scaling])
        ]

    def default_config(self, gemm: GemmWorkload) -> Fp8Config:
        return Fp8Config(0, max(gemm.m, PADDED_ROWS), _scalings()[0])

    def builds(self) -> Sequence[Build]:
        return [FP8_ROWS.build]


def _multiple(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


def _scalings() -> tuple[Scaling, ...]:
    capability = current_gpu().capability
    if capability == _FUSED_CAPABILITY and lt_version() >= _FUSED_VERSION:
        return ("fused", "after")
    return ("after",)
