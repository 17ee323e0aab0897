"""Base class of CPU kernels: a GEMM by torch operations, quantized by the reference formulas."""

from __future__ import annotations

from abc import abstractmethod

import torch

from flexq_bench.kernels.contract import (
    CheckedGemm,
    Config,
    GemmCall,
    KernelSpec,
    PackedOperand,
    checked_scales,
)
from flexq_bench.kernels.formats import NumberFormat, Operand


def stand_in_spec(of: KernelSpec, summary: str) -> KernelSpec:
    """Return the spec of the CPU version of a CUDA kernel, which has the same formats."""
    return KernelSpec(of.name, "cpu", of.weight, of.activation, summary, of.variant)


class TorchGemm(CheckedGemm):
    """Kernel without configurations whose `activate` quantizes, packs and copies."""

    def pack(self, operand: Operand, fmt: NumberFormat) -> PackedOperand:
        """Pack an operand of this format; unless overridden, into its own tensors."""
        buffers = {"values": operand.values}
        if not fmt.is_dense:
            buffers["scales"] = checked_scales(operand, fmt)
        for name in ("zero_points", "row_scales"):
            tensor = getattr(operand, name)
            if tensor is not None:
                buffers[name] = tensor
        return PackedOperand(buffers, operand.rows, operand.k)

    def pack_weight(self, weight: Operand) -> PackedOperand:
        return self.pack(weight, self.spec.weight)

    def pack_activation(self, x: Operand) -> PackedOperand:
        return self.pack(x, self.spec.activation)

    @abstractmethod
    def multiply(self, x: PackedOperand, w: PackedOperand) -> torch.Tensor:
        """Return x · w^T [M,N], FP32 or FP64."""

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        zeros = torch.zeros(m, k, dtype=torch.float16, device=device)
        return self.pack_activation(self.quantize_activation(zeros))

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        packed.copy_from(self.pack_activation(self.quantize_activation(x)))

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, _ = call
        y = self.multiply(x, w)
        out.copy_(y if bias is None else y + bias.to(y.dtype))
