"""DGQ on a CPU (arXiv 2310.04836): int8 weights from codes and group scales, one integer GEMM.

`dual-w6a8` is the same with codes of 6 bits.
"""

from __future__ import annotations

import torch

from flexq_bench.kernels.contract import (
    KernelSpec,
    PackedOperand,
    checked_scales,
)
from flexq_bench.kernels.cpu.torch_gemm import TorchGemm, stand_in_spec
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.formats.dual_grained import CODE_BITS, int8_values
from flexq_bench.kernels.formats.symmetric_quantization import quantize_static


class DualGrainedGemm(TorchGemm):
    """`dgq-w4a8`, its `[static]`, `dual-w6a8`: int8 sums over all of K, scaled once."""

    def __init__(self, kernel: KernelSpec) -> None:
        bits = kernel.weight.bits
        summary = (
            f"{'DGQ' if bits == CODE_BITS else 'two-level'} W{bits}A8 in torch: "
            "weights made int8 with their group's scale"
            + (", activations with one static scale" if kernel.variant else "")
        )
        self.spec = stand_in_spec(kernel, summary)

    def quantize_activation(self, x: torch.Tensor) -> Operand:
        return quantize_static(x, 8) if self.spec.variant else super().quantize_activation(x)

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        static = packed.buffers.get("static")
        if static is None:
            super().activate(x, packed)
        else:
            packed.copy_from(self.pack_activation(quantize_static(x, 8, float(static))))

    def pack_weight(self, weight: Operand) -> PackedOperand:
        checked_scales(weight, self.spec.weight)
        assert weight.row_scales is not None  # checked by checked_scales
        buffers = {"codes": int8_values(weight), "scales": weight.row_scales}
        return PackedOperand(buffers, weight.rows, weight.k)

    def multiply(self, x: PackedOperand, w: PackedOperand) -> torch.Tensor:
        # Sums of int8 products stay under 2^53, so float64 is exact; it has a GEMM on every CPU.
        sums = x.buffers["values"].double() @ w.buffers["codes"].double().T
        return sums * x.buffers["scales"].double() * w.buffers["scales"].double().T
