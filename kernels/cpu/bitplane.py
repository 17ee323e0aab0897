"""Bit-plane GEMM on a CPU, Σ ±2^(s+t) popc(W_s & X_t), in torch: FlexQ and ABQ-LLM.

torch has no population count, but popc(a & b) of two bit vectors is the dot product of their zeros
and ones. All pairs of planes of 128 k are one FP32 GEMM, which is exact because a dot product of
128 bits is at most 128.
"""

from __future__ import annotations

import torch

from flexq_bench.kernels.contract import (
    Config,
    KernelSpec,
    LinearKernel,
    PackedOperand,
    check_gemm,
    checked_scales,
)
from flexq_bench.kernels.formats import Kind, NumberFormat, Operand
from flexq_bench.kernels.formats.bitplanes import pack_planes, plane_weights, unpack_planes

CHUNK_K = 128


class BitPlaneGemm(LinearKernel):
    """W<w_bits>A<a_bits>; grouped: a scale per 128 of k (FlexQ), else one per row (ABQ-LLM).

    kind: of the weights' codes.
    """

    def __init__(
        self,
        name: str,
        w_bits: int,
        a_bits: int,
        *,
        variant: str = "",
        grouped: bool = True,
        kind: Kind = "symmetric",
    ) -> None:
        group = CHUNK_K if grouped else None
        self.spec = KernelSpec(
            name=name,
            variant=variant,
            backend="cpu",
            weight=NumberFormat(w_bits, group, kind),
            activation=NumberFormat(a_bits, group),
            summary=f"W{w_bits}A{a_bits} through bit planes, in torch",
        )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        return _pack(weight, self.spec.weight)

    def pack_activation(self, x: Operand) -> PackedOperand:
        return _pack(x, self.spec.activation)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        bits, group = self.spec.activation.bits, self.spec.activation.group
        groups = 1 if group is None else -(-k // group)
        buffers = {
            "planes": torch.empty(bits, m, -(-k // 8), dtype=torch.uint8, device=device),
            "scales": torch.empty(m, groups, dtype=torch.float16, device=device),
        }
        return PackedOperand(buffers, m, k)

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
        xs, ws = _planes_in_chunks(x), _planes_in_chunks(w)
        a_bits, w_bits = self.spec.activation.bits, self.spec.weight.bits
        pairs = torch.bmm(xs, ws.transpose(1, 2))  # [chunks, a_bits·M, w_bits·N]
        pairs = pairs.view(-1, a_bits, x.rows, w_bits, w.rows)
        a_weights = torch.tensor(plane_weights(a_bits), dtype=torch.float64)
        w_weights = torch.tensor(plane_weights(w_bits), dtype=torch.float64)
        sums = torch.einsum("gamwn,a,w->gmn", pairs.double(), a_weights, w_weights)
        if self.spec.weight.group is None:
            sums = sums.sum(dim=0, keepdim=True)
        scale = torch.einsum(
            "mg,ng->gmn", x.buffers["scales"].double(), w.buffers["scales"].double()
        )
        y = (sums * scale).sum(dim=0)
        out.copy_(y if bias is None else y + bias.double())


def _pack(operand: Operand, fmt: NumberFormat) -> PackedOperand:
    scales = checked_scales(operand, fmt)
    buffers = {"planes": pack_planes(operand.values, operand.bits), "scales": scales}
    return PackedOperand(buffers, operand.rows, operand.k)


def _planes_in_chunks(operand: PackedOperand) -> torch.Tensor:
    """Unpack to FP32 [chunks, bits·rows, 128]; row bit·rows + r is plane `bit` of row r."""
    bits = unpack_planes(operand.buffers["planes"], operand.k)
    padded = torch.nn.functional.pad(bits, (0, -operand.k % CHUNK_K)).float()
    return padded.view(bits.shape[0] * operand.rows, -1, CHUNK_K).transpose(0, 1)
