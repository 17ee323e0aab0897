"""Atom on a CPU (arXiv 2310.19102): reordered INT4 groups and one INT8 group, integer sums."""

from __future__ import annotations

from dataclasses import replace

import torch

from flexq_bench.kernels.contract import (
    KernelSpec,
    PackedOperand,
    checked_scales,
)
from flexq_bench.kernels.cpu.torch_gemm import TorchGemm
from flexq_bench.kernels.formats import NumberFormat, Operand, quantize_mixed
from flexq_bench.kernels.formats.mixed import ACTIVATION_CLIP, GROUP, order_of

_FORMAT = NumberFormat(4, GROUP, kind="mixed")


class MixedGemm(TorchGemm):
    """`atom-w4a4`: integer sums per group, then the scales of both operands."""

    spec = KernelSpec(
        name="atom-w4a4",
        backend="cpu",
        weight=_FORMAT,
        activation=replace(_FORMAT, clip=ACTIVATION_CLIP),
        version=2,  # 2: activations are clipped
        summary="Atom's W4A4 in torch: INT4 groups, the last one INT8, channels reordered",
    )

    def pack(self, operand: Operand, fmt: NumberFormat) -> PackedOperand:
        scales = checked_scales(operand, fmt)
        buffers = {"codes": operand.values, "scales": scales, "order": order_of(operand)}
        return PackedOperand(buffers, operand.rows, operand.k)

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        order = packed.buffers["order"]
        packed.copy_from(self.pack_activation(quantize_mixed(x, order, clip=ACTIVATION_CLIP)))

    def for_weights(self, packed: PackedOperand, w: PackedOperand) -> PackedOperand:
        return packed.with_buffers(order=w.buffers["order"])

    def multiply(self, x: PackedOperand, w: PackedOperand) -> torch.Tensor:
        # Sums of a group stay under 2^24, which FP32 holds exactly.
        sums = torch.bmm(_in_groups(x), _in_groups(w).transpose(1, 2)).double()
        scale = torch.einsum(
            "mg,ng->gmn", x.buffers["scales"].double(), w.buffers["scales"].double()
        )
        return (sums * scale).sum(dim=0)


def _in_groups(operand: PackedOperand) -> torch.Tensor:
    """Return codes as FP32 [groups, rows, 128]."""
    padded = torch.nn.functional.pad(operand.buffers["codes"].float(), (0, -operand.k % GROUP))
    return padded.view(operand.rows, -1, GROUP).transpose(0, 1)
