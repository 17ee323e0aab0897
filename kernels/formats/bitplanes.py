"""Bit planes: plane b of a matrix holds bit b of every code's two's complement."""

from __future__ import annotations

import torch

from flexq_bench.kernels.errors import ShapeError

_BITS_IN_BYTE = 8


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
