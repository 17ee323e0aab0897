"""Operands with chosen codes and scales, for tests of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import torch

from flexq_bench.kernels.contract import Backend, LinearKernel
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.formats.mixed import GROUP, default_order, joined, tail_start
from flexq_bench.kernels.formats.scales import SCALE_TYPES, per_row
from flexq_bench.kernels.registry import resolve

BALANCED_TOP = 2  # the largest code of ABQ-LLM's W2*


def linear_kernel(label: str, backend: Backend) -> LinearKernel:
    kernel = resolve(label, backend)
    assert isinstance(kernel, LinearKernel)
    return kernel


def random_codes(rows: int, k: int, bits: int, *, seed: int, extremes: float = 0.2) -> torch.Tensor:
    """Codes int8 [rows, k] over the whole range; a share of them the extremes and zero."""
    generator = torch.Generator().manual_seed(seed)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    codes = torch.randint(low, high + 1, (rows, k), generator=generator)
    special = torch.tensor([low, low + 1, high, 0])
    chosen = special[torch.randint(0, 4, (rows, k), generator=generator)]
    at = torch.rand(rows, k, generator=generator) < extremes
    return torch.where(at, chosen, codes).to(torch.int8)


def random_floats(fmt: NumberFormat, rows: int, k: int, *, seed: int) -> Operand:
    """Floats: every number is as likely; scales are small powers of two."""
    generator = torch.Generator().manual_seed(seed)
    numbers = fmt.float_type.numbers()
    numbers = numbers[numbers.isfinite()]
    at = torch.randint(len(numbers), (rows, k), generator=generator)
    return float_operand(fmt, numbers[at], seed=seed)


def float_operand(fmt: NumberFormat, numbers: torch.Tensor, *, seed: int | None = None) -> Operand:
    """Numbers [rows, K] as an operand of a format; scales of 1, or with a seed 1/2, 1 or 2."""
    rows, k = numbers.shape
    groups = 1 if fmt.group is None else -(-k // fmt.group)
    blocks = 1 if fmt.block_rows is None else -(-rows // fmt.block_rows)
    powers = torch.zeros(blocks, groups)
    if seed is not None and fmt.scale != "fp16":
        generator = torch.Generator().manual_seed(seed)
        powers = torch.randint(-1, 2, (blocks, groups), generator=generator).float()
    scales = per_row(torch.exp2(powers).to(SCALE_TYPES[fmt.scale]), fmt.block_rows, rows)
    of_rows = torch.ones(rows, 1) if fmt.scale == "e4m3" else None
    return Operand(
        numbers.to(fmt.float_type.dtype),
        scales,
        fmt.bits,
        fmt.group,
        row_scales=of_rows,
        element=fmt.element,
        block_rows=fmt.block_rows,
    )


def unit_operand(codes: torch.Tensor, bits: int, group: int | None, scale: float = 1.0) -> Operand:
    """Codes with one scale everywhere; a power of two keeps every product exact."""
    groups = 1 if group is None else -(-codes.shape[1] // group)
    scales = torch.full((codes.shape[0], groups), scale, dtype=torch.float16)
    return Operand(codes, scales, bits, group)


def random_weight(fmt: NumberFormat, n: int, k: int, *, seed: int) -> Operand:
    """Codes of any format over its whole range; scales that keep every product exact."""
    if fmt.kind == "dual":
        assert fmt.group is not None
        dual = random_dual_grained if fmt.has_zero_points else random_two_level
        return dual(n, k, fmt.group, seed=seed)
    if fmt.kind == "balanced":
        codes = random_codes(n, k, fmt.bits, seed=seed).clamp(-BALANCED_TOP, BALANCED_TOP)
        return unit_operand(codes, fmt.bits, fmt.group)
    if fmt.kind == "mixed":
        return random_mixed(n, k, seed=seed)
    if fmt.kind == "asymmetric":
        return random_asymmetric(n, k, fmt, seed=seed)
    if fmt.kind == "float":
        return random_floats(fmt, n, k, seed=seed)
    return unit_operand(random_codes(n, k, fmt.bits, seed=seed), fmt.bits, fmt.group)


def random_mixed(rows: int, k: int, *, seed: int, scale: float = 1.0) -> Operand:
    """4-bit codes with 8 bits in the last group, over the whole ranges, in the default order."""
    start = tail_start(k)
    tail = unit_operand(random_codes(rows, k - start, 8, seed=seed), 8, GROUP, scale)
    if start == 0:
        return joined(None, tail, default_order(k))
    head = unit_operand(random_codes(rows, start, 4, seed=seed + 1), 4, GROUP, scale)
    return joined(head, tail, default_order(k))


def random_asymmetric(n: int, k: int, fmt: NumberFormat, *, seed: int) -> Operand:
    """Codes and zero points over the whole range; scales of 1."""
    half = 1 << (fmt.bits - 1)
    codes = (random_codes(n, k, fmt.bits, seed=seed).short() + half).to(torch.int8)
    unscaled = unit_operand(codes, fmt.bits, fmt.group)
    generator = torch.Generator().manual_seed(seed)
    zeros = torch.randint(1 - 2 * half, 1, (n, unscaled.groups), generator=generator)
    return replace(unscaled, zero_points=zeros.to(torch.int8))


def random_dual_grained(n: int, k: int, group: int, *, seed: int) -> Operand:
    """Codes 0 … 15, zero points and integer scales of groups over all that fits int8; rows of 1."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (n, k), generator=generator).to(torch.int8)
    zeros = torch.randint(-15, 1, (n, -(-k // group)), generator=generator)
    most = [[min(127 // max(15 + z, 1), 128 // max(-z, 1)) for z in row] for row in zeros.tolist()]
    draws = torch.rand(zeros.shape, generator=generator)
    scales = ((draws * torch.tensor(most)).long() + 1).half()
    ones = torch.ones(n, 1, dtype=torch.float16)
    return Operand(codes, scales, 4, group, zeros.to(torch.int8), row_scales=ones)


def random_two_level(n: int, k: int, group: int, *, seed: int) -> Operand:
    """Codes -31 … 31 and integer scales of groups 1 … 4; rows of 1."""
    generator = torch.Generator().manual_seed(seed)
    codes = random_codes(n, k, 6, seed=seed).clamp(min=-31)
    scales = torch.randint(1, 5, (n, -(-k // group)), generator=generator).half()
    ones = torch.ones(n, 1, dtype=torch.float16)
    return Operand(codes, scales, 6, group, row_scales=ones)


def rescaled(operand: Operand, *, seed: int) -> Operand:
    """The same codes with scales over many decades."""
    assert operand.scales is not None
    if operand.scales.dtype == torch.float8_e8m0fnu:
        exponents = random_scales(*operand.scales.shape, seed=seed).log2().round()
        return replace(operand, scales=exponents.exp2().to(operand.scales.dtype))
    if operand.scales.dtype == torch.float8_e4m3fn:
        shape = operand.scales.shape
        scales = random_scales(*shape, seed=seed, low=2.0**-9, high=448).to(operand.scales.dtype)
        return replace(operand, scales=scales, row_scales=torch.full((operand.rows, 1), 0.01))
    if operand.row_scales is not None:
        rows = random_scales(operand.rows, 1, seed=seed)
        return replace(operand, row_scales=rows)
    return replace(operand, scales=random_scales(*operand.scales.shape, seed=seed))


def random_scales(
    rows: int, groups: int, *, seed: int, low: float = 1e-6, high: float = 1e2
) -> torch.Tensor:
    """FP16 scales [rows, groups], spread evenly over the decades from low to high."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(rows, groups, generator=generator, dtype=torch.float64)
    return (low * (high / low) ** exponent).to(torch.float16)


def int_gemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """X · W^T of integer codes in int64 [M, N]: shares nothing with any kernel or format.

    Sums below 2^53 are exact in float64, whose products are much faster than those of int64.
    """
    return (x.double() @ w.double().T).long()


def weights_of_lanes(
    n: int, k: int, of_lane: Callable[[int], Callable[[int, int], list[torch.Tensor]]]
) -> torch.Tensor:
    """Weights [n, k] in float64 of what lanes of a warp have in the registers of operand A.

    of_lane: for a lane, its two weights [row tiles, steps] by MMA of a step and register. PTX ISA,
    mma.m16n8k16: lane l has rows l/4 and l/4 + 8 of A in registers 0, 2 and 1, 3. Which k its
    halves stand for is the kernels' own choice, the same for both operands.
    """
    row_tiles, steps = -(-n // 16), -(-k // 128)
    found = torch.zeros(row_tiles, 16, steps, 128, dtype=torch.float64)
    for lane in range(32):
        weights = of_lane(lane)
        for mma, register in product(range(8), range(4)):
            row = lane // 4 + 8 * (register % 2)
            at = 32 * (mma // 2) + 8 * (lane % 4) + 4 * (mma % 2) + 2 * (register // 2)
            found[:, row, :, at], found[:, row, :, at + 1] = weights(mma, register)
    whole = found.view(row_tiles * 16, steps * 128)
    assert not whole[n:].any()
    assert not whole[:, k:].any()
    return whole[:n, :k]
