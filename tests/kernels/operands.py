"""Operands with chosen codes and scales, for tests of kernels."""

from __future__ import annotations

import torch

from kernels.formats import Operand
from kernels.formats.minifloat import minifloat_numbers


def random_codes(rows: int, k: int, bits: int, *, seed: int, extremes: float = 0.2) -> torch.Tensor:
    """Codes int8 [rows, k] over the whole range; a share of them the extremes and zero."""
    generator = torch.Generator().manual_seed(seed)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    codes = torch.randint(low, high + 1, (rows, k), generator=generator)
    special = torch.tensor([low, low + 1, high, 0])
    chosen = special[torch.randint(0, 4, (rows, k), generator=generator)]
    at = torch.rand(rows, k, generator=generator) < extremes
    return torch.where(at, chosen, codes).to(torch.int8)


def random_minifloats(rows: int, k: int, bits: int, *, seed: int) -> torch.Tensor:
    """Numbers FP16 [rows, k] of E3M2 (6 bits) or E3M1 (5): every code is as likely."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << bits, (rows, k), generator=generator)
    return minifloat_numbers(bits)[codes].half()


def unit_operand(codes: torch.Tensor, bits: int, group: int | None, scale: float = 1.0) -> Operand:
    """Codes with one scale everywhere; a power of two keeps every product exact."""
    groups = 1 if group is None else -(-codes.shape[1] // group)
    scales = torch.full((codes.shape[0], groups), scale, dtype=torch.float16)
    return Operand(codes, scales, bits, group)


def random_scales(
    rows: int, groups: int, *, seed: int, low: float = 1e-6, high: float = 1e2
) -> torch.Tensor:
    """FP16 scales [rows, groups], spread evenly over the decades from low to high."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(rows, groups, generator=generator, dtype=torch.float64)
    return (low * (high / low) ** exponent).to(torch.float16)


def int_gemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """X · W^T of integer codes in int64 [M, N]: shares nothing with any kernel or format."""
    return x.to(torch.int64) @ w.to(torch.int64).T
