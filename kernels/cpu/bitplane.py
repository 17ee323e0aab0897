"""Bit-plane GEMM on a CPU, Σ ±2^(s+t) popc(W_s & X_t), in torch: FlexQ and ABQ-LLM.

Bit planes: plane b of a matrix holds bit b of every code's two's complement.
torch has no population count, but popc(a & b) of two bit vectors is the dot product of their zeros
and ones. All pairs of planes of 128 k are one FP32 GEMM, which is exact because a dot product of
128 bits is at most 128.
"""

from __future__ import annotations

import torch

from flexq_bench.kernels.contract import (
    KernelSpec,
    PackedOperand,
    checked_scales,
)
from flexq_bench.kernels.cpu.torch_gemm import TorchGemm, stand_in_spec
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import NumberFormat, Operand

CHUNK_K = 128
_BITS_IN_BYTE = 8


class BitPlaneGemm(TorchGemm):
    """Scales are per 128 of k (FlexQ) or per row (ABQ-LLM)."""

    def __init__(self, kernel: KernelSpec) -> None:
        w_bits, a_bits = kernel.weight.bits, kernel.activation.bits
        summary = f"W{w_bits}A{a_bits} through bit planes, in torch"
        self.spec = stand_in_spec(kernel, summary)

    def pack(self, operand: Operand, fmt: NumberFormat) -> PackedOperand:
        scales = checked_scales(operand, fmt)
        buffers = {"planes": pack_planes(operand.values, operand.bits), "scales": scales}
        return PackedOperand(buffers, operand.rows, operand.k)

    def multiply(self, x: PackedOperand, w: PackedOperand) -> torch.Tensor:
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
        return (sums * scale).sum(dim=0)


def _planes_in_chunks(operand: PackedOperand) -> torch.Tensor:
    """Unpack to FP32 [chunks, bits·rows, 128]; row bit·rows + r is plane `bit` of row r."""
    bits = unpack_planes(operand.buffers["planes"], operand.k)
    padded = torch.nn.functional.pad(bits, (0, -operand.k % CHUNK_K)).float()
    return padded.view(bits.shape[0] * operand.rows, -1, CHUNK_K).transpose(0, 1)


def plane_weights(bits: int) -> list[int]:
    """Return the weights of the planes: 2^b for plane b, -2^(bits-1) for the top (sign) plane."""
    return [1 << b for b in range(bits - 1)] + [-(1 << (bits - 1))]


def pack_planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes int8 [rows, K] to planes uint8 [bits, rows, ceil(K/8)], lowest k in bit 0.

    K is padded with zeros. Raises ShapeError if a code does not fit `bits` bits.
    """
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if codes.numel() and not low <= int(codes.min()) <= int(codes.max()) <= high:
        raise ShapeError(
            f"codes of {bits} bits lie in {low} … {high}, got {int(codes.min())} … "
            f"{int(codes.max())}"
        )
    rows, k = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -k % _BITS_IN_BYTE))
    planes = torch.stack([(padded >> b) & 1 for b in range(bits)]).to(torch.uint8)
    shifts = torch.arange(_BITS_IN_BYTE, dtype=torch.uint8, device=codes.device)
    in_bytes = planes.view(bits, rows, -1, _BITS_IN_BYTE) << shifts
    return in_bytes.sum(dim=3, dtype=torch.uint8)


def unpack_planes(planes: torch.Tensor, k: int) -> torch.Tensor:
    """Unpack planes [bits, rows, ceil(K/8)] to uint8 zeros and ones [bits, rows, K]."""
    shifts = torch.arange(_BITS_IN_BYTE, dtype=torch.uint8, device=planes.device)
    bits = (planes.unsqueeze(3) >> shifts) & 1
    return bits.view(planes.shape[0], planes.shape[1], -1)[:, :, :k]
