"""Base class of CPU kernels: a GEMM by torch operations, quantized by the reference formulas."""

from __future__ import annotations

from abc import abstractmethod

import torch

from flexq_bench.kernels.contract import Config, LinearKernel, PackedOperand, check_gemm


class TorchGemm(LinearKernel):
    """Kernel without configurations whose `activate` quantizes, packs and copies."""

    @abstractmethod
    def multiply(self, x: PackedOperand, w: PackedOperand) -> torch.Tensor:
        """Return x · w^T [M,N], FP32 or FP64."""

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        zeros = torch.zeros(m, k, dtype=torch.float16, device=device)
        return self.pack_activation(self.quantize_activation(zeros))

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        packed.copy_from(self.pack_activation(self.quantize_activation(x)))

    def gemm(
        self,
        x: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> None:
        check_gemm(x, w, out)
        y = self.multiply(x, w)
        out.copy_(y if bias is None else y + bias.to(y.dtype))
