"""Common code of peer kernels that take dense 16-bit activations."""

from __future__ import annotations

import torch

from flexq_bench.kernels.contract import Config, LinearKernel, PackedOperand
from flexq_bench.kernels.cuda.cublas.dense import activated, padded
from flexq_bench.kernels.formats import Operand


class HalfActivationKernel(LinearKernel):
    """Base class of a package's weight-only kernels: activations are `values` [M, padded K].

    k_multiple: K is padded to a multiple of it. dtype: of activations; for FP16 without padding,
    `linear` reads the activations without a copy.
    """

    dtype = torch.float16
    k_multiple = 1

    def padded_k(self, k: int) -> int:
        """Return K rounded up to k_multiple."""
        return -(-k // self.k_multiple) * self.k_multiple

    def quantize_activation(self, x: torch.Tensor) -> Operand:
        return Operand(x.to(self.dtype).float(), None, 16, None)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        values = torch.zeros(m, self.padded_k(k), dtype=self.dtype, device=device)
        return PackedOperand({"values": values}, m, k)

    def pack_activation(self, x: Operand) -> PackedOperand:
        values = padded(x.values.to(self.dtype), x.rows, self.padded_k(x.k))
        return PackedOperand({"values": values}, x.rows, x.k)

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        packed.buffers["values"][:, : packed.k] = x

    def linear(
        self,
        x: torch.Tensor,
        packed: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> None:
        self.gemm(activated(self, x, packed), w, out, bias=bias, config=config)


def store(y: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Copy a package's output [M, >= N] to `out`, for packages without an output argument."""
    out.copy_(y[:, : out.shape[1]])
    if bias is not None:
        out += bias
