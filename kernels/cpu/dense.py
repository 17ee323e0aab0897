"""CPU versions of the baselines: W8A8 with per-row scales, dense FP16, dequantized weights."""

from __future__ import annotations

import torch

from flexq_bench.kernels.contract import (
    KernelSpec,
    PackedOperand,
    checked_scales,
)
from flexq_bench.kernels.cpu.torch_gemm import TorchGemm, stand_in_spec
from flexq_bench.kernels.formats import NumberFormat, Operand


class Int8Gemm(TorchGemm):
    """W8A8, one scale per token and per output feature: integer GEMM, then scaling."""

    def __init__(self, kernel: KernelSpec) -> None:
        self.spec = stand_in_spec(kernel, "stand-in for cuBLASLt W8A8: torch's int8 GEMM")

    def pack(self, operand: Operand, fmt: NumberFormat) -> PackedOperand:
        scales = checked_scales(operand, fmt)
        # Two columns at least: torch's CPU int8 GEMM is wrong for K = 1 (seen in torch 2.13).
        codes = torch.nn.functional.pad(operand.values, (0, max(2 - operand.k, 0)))
        return PackedOperand({"codes": codes, "scales": scales}, operand.rows, operand.k)

    def multiply(self, x: PackedOperand, w: PackedOperand) -> torch.Tensor:
        sums = torch._int_mm(x.buffers["codes"], w.buffers["codes"].T)
        return sums.double() * x.buffers["scales"].double() * w.buffers["scales"].double().T


class Fp16Gemm(TorchGemm):
    """Dense FP16 with FP32 accumulation."""

    def __init__(self, kernel: KernelSpec) -> None:
        summary = "stand-in for cuBLAS FP16: torch's FP32 GEMM of FP16 values"
        self.spec = stand_in_spec(kernel, summary)

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        packed.buffers["values"].copy_(x)

    def multiply(self, x: PackedOperand, w: PackedOperand) -> torch.Tensor:
        return x.buffers["values"].float() @ w.buffers["values"].float().T


class DequantizedGemm(TorchGemm):
    """FP8 or weight-only: float64 GEMM of dequantized values."""

    def __init__(self, kernel: KernelSpec) -> None:
        summary = f"stand-in for {kernel.name}: torch's float64 GEMM of dequantized values"
        self.spec = stand_in_spec(kernel, summary)

    def multiply(self, x: PackedOperand, w: PackedOperand) -> torch.Tensor:
        return _dequantize(x, self.spec.activation) @ _dequantize(w, self.spec.weight).T


def _dequantize(packed: PackedOperand, fmt: NumberFormat) -> torch.Tensor:
    b = packed.buffers
    operand = Operand(
        b["values"],
        b.get("scales"),
        fmt.bits,
        fmt.group,
        zero_points=b.get("zero_points"),
        row_scales=b.get("row_scales"),
    )
    return operand.dequantize()
