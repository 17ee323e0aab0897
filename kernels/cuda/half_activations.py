"""Base class of kernels that take dense 16-bit activations."""

from __future__ import annotations

import torch

from flexq_bench.kernels.contract import CheckedGemm, PackedOperand
from flexq_bench.kernels.formats import Operand

_ALIGNMENT = 16  # bytes, of a row that a kernel reads without a copy


class HalfActivationKernel(CheckedGemm):
    """Base class of weight-only and dense kernels: activations are `values` [>= M, padded K].

    dtype: of the activations. k_multiple: K is padded to a multiple of it. min_rows: rows that are
    allocated at least. `linear` reads activations that are already in this layout without a copy.
    """

    dtype = torch.float16
    k_multiple = 1
    min_rows = 1

    def padded_k(self, k: int) -> int:
        """Return K rounded up to k_multiple."""
        return -(-k // self.k_multiple) * self.k_multiple

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        shape = max(m, self.min_rows), self.padded_k(k)
        return PackedOperand({"values": torch.zeros(shape, dtype=self.dtype, device=device)}, m, k)

    def pack_activation(self, x: Operand) -> PackedOperand:
        packed = self.empty_activation(x.rows, x.k, x.values.device)
        self.activate(x.values, packed)
        return packed

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        packed.buffers["values"][: packed.rows, : packed.k] = x

    def activated(self, x: torch.Tensor, packed: PackedOperand) -> PackedOperand:
        """Return x as packed activations, without a copy if it has their layout and alignment."""
        values = packed.buffers["values"]
        same_layout = x.dtype == values.dtype == torch.float16 and x.shape[1] == values.shape[1]
        if same_layout and x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0:
            return PackedOperand({"values": x}, packed.rows, packed.k)
        return super().activated(x, packed)
