"""Inputs of a linear layer from a seed: realistic ones, and ones with an exact result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.errors import KernelError
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.formats.asymmetric import asymmetric_types
from flexq_bench.kernels.formats.dual_grained import TOP_SIX_BIT_SCALE
from flexq_bench.kernels.formats.mixed import (
    GROUP,
    HEAD_BITS,
    TAIL_BITS,
    default_order,
    joined,
    tail_start,
)
from flexq_bench.measure.bound_kernel import BoundKernel
from flexq_bench.workloads.gemm import GemmWorkload

INPUT_DISTRIBUTION = "normal-outlier-v1"
WEIGHT_STD = 0.02
# A few channels have values about 20 times larger than the rest, in about 0.1 % of the features
# (LLM.int8(), arXiv 2208.07339, section 4).
OUTLIER_FACTOR = 20.0
OUTLIER_CHANNELS = 0.001

# Products of scales are in 2^-10 … 2^-8: sums of codes below 2^24 then stay under 2^14 and are
# multiples of 2^-10, in the middle of FP16's normal range.
_SCALE_EXPONENT = -5
_SCALE_SPREAD = 2
_EXTREME_FRACTION = 0.03  # of the codes, for each of the lowest, the highest and zero
# Codes up to this, for this many k, keep |sum| at or below 2,048, up to which FP16 represents every
# integer.
_SMALL_CODE = 2
_SMALL_TERMS = 256
_DUAL_MIDDLE = 8  # code of zero with a zero point of -8; dual-grained 4-bit codes are 0 … 15


@dataclass(frozen=True, slots=True)
class LinearInputs:
    """X [M,K] and W [N,K] in the form that the reference takes.

    x_real: [M,K] of the kernel's input type, for the `linear` stage; x is its quantization by the
    kernel's own rule. None: codes were drawn directly (the `gemm` stage).
    """

    x_real: torch.Tensor | None
    x: Operand
    w: Operand


def derive_seed(seed: int, *parts: object) -> int:
    """A seed of 63 bits that depends on all parts and on nothing else."""
    text = "\0".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def realistic_inputs(
    kernel: LinearKernel,
    gemm: GemmWorkload,
    device: torch.device,
    seed: int,
    *,
    w: Operand | None = None,
) -> LinearInputs:
    """The distribution INPUT_DISTRIBUTION: normal weights, normal activations with outliers.

    Every kernel gets the same real values for one shape and seed, in its own format. w: weights
    drawn earlier; None: they are drawn now.
    """
    if w is None:
        w = realistic_weight(kernel, gemm.n, gemm.k, device, weight_seed(seed))
    generator = torch.Generator(device).manual_seed(seed)
    x_real = realistic_activations(gemm, generator, kernel.spec.input_dtype)
    return LinearInputs(x_real, quantized_activation(kernel, x_real), w)


def weight_seed(seed: int) -> int:
    """The seed that `realistic_inputs` draws its weights from."""
    return derive_seed(seed, "weights")


def realistic_weight(
    kernel: LinearKernel, n: int, k: int, device: torch.device, seed: int
) -> Operand:
    """The weights [N,K] of INPUT_DISTRIBUTION in the kernel's format."""
    return _plain(kernel.quantize_weight(real_weight(n, k, device, seed)))


def quantized_activation(kernel: LinearKernel, x_real: torch.Tensor) -> Operand:
    """Quantize activations by the kernel's rule.

    Its code gets a copy and keeps what it returned, so that it can change neither afterwards.
    """
    return _plain(kernel.quantize_activation(x_real.clone()))


def real_weight(n: int, k: int, device: torch.device, seed: int) -> torch.Tensor:
    """The weights of INPUT_DISTRIBUTION before they are quantized, FP16 [N,K]."""
    generator = torch.Generator(device).manual_seed(seed)
    w = torch.randn(n, k, generator=generator, device=device, dtype=torch.float32)
    return w.mul_(WEIGHT_STD).half()


def realistic_activations(
    gemm: GemmWorkload, generator: torch.Generator, dtype: torch.dtype = torch.float16
) -> torch.Tensor:
    """The activations of INPUT_DISTRIBUTION, [M,K], on the generator's device."""
    device = generator.device
    x = torch.randn(gemm.m, gemm.k, generator=generator, device=device, dtype=torch.float32)
    count = max(1, round(gemm.k * OUTLIER_CHANNELS))
    channels = torch.randperm(gemm.k, generator=generator, device=device)[:count]
    x[:, channels] *= OUTLIER_FACTOR
    return x.to(dtype)


def full_range_inputs(bound: BoundKernel, seed: int, *, density: float = 1.0) -> LinearInputs:
    """Codes over the full range, with many extremes, and scales that are powers of two.

    density: fraction of nonzero activations; lower it if sums exceed the exact range of FP32. Only
    for kernels whose weights and activations are both integers.
    """
    gemm, device = bound.gemm, bound.device
    generator = torch.Generator(device).manual_seed(seed)
    spec = bound.kernel.spec
    x = _full_range(gemm.m, gemm.k, spec.activation, generator, device)
    keep = (
        torch.rand(gemm.m, gemm.k, generator=generator, device=device, dtype=torch.float32)
        < density
    )
    x = replace(x, values=x.values * keep)
    w = _full_range(gemm.n, gemm.k, spec.weight, generator, device)
    return _for_stage(bound, x, w)


def small_sum_inputs(bound: BoundKernel, seed: int) -> LinearInputs:
    """Sparse small codes with all scales 1: the output is an integer that FP16 represents.

    In the `linear` stage each group needs one code at the top to have scale 1, so outputs may
    exceed that range. Only for kernels whose weights and activations are both integers.
    """
    gemm, device = bound.gemm, bound.device
    generator = torch.Generator(device).manual_seed(seed)
    terms = min(1.0, _SMALL_TERMS / gemm.k)

    def draw(rows: int, fmt: NumberFormat, density: float, k: int = gemm.k) -> Operand:
        if fmt.kind == "mixed":
            return _mixed(k, lambda part, of: draw(rows, of, density, part))
        shape = (rows, k)
        top = min(_SMALL_CODE, _limits(fmt)[1] // (2 if fmt.kind == "asymmetric" else 1))
        codes = torch.randint(
            -top, top + 1, shape, generator=generator, device=device, dtype=torch.int16
        )
        keep = torch.rand(shape, generator=generator, device=device, dtype=torch.float32) < density
        groups = _groups(k, fmt)
        ones = torch.ones(rows, groups, dtype=torch.float16, device=device)
        small = (codes * keep).to(torch.int8)
        if fmt.kind == "dual":
            middle = None
            if fmt.has_zero_points:
                middle = torch.full_like(ones, -_DUAL_MIDDLE, dtype=torch.int8)
                small += _DUAL_MIDDLE
            return Operand(small, ones, fmt.bits, fmt.group, middle, row_scales=ones[:, :1])
        if fmt.has_zero_points:
            of_codes, of_zeros = asymmetric_types(fmt.bits)
            middle = torch.full_like(ones, -top, dtype=of_zeros)
            return Operand((small + top).to(of_codes), ones, fmt.bits, fmt.group, middle)
        return Operand(small, ones, fmt.bits, fmt.group)

    x = draw(gemm.m, bound.kernel.spec.activation, terms)
    w = draw(gemm.n, bound.kernel.spec.weight, 1.0)
    return _for_stage(bound, x, w)


def _full_range(
    rows: int, k: int, fmt: NumberFormat, generator: torch.Generator, device: torch.device
) -> Operand:
    if fmt.kind == "mixed":
        return _mixed(k, lambda part, of: _full_range(rows, part, of, generator, device))
    shape = (rows, k)
    bottom, top = _limits(fmt)
    codes = torch.randint(
        bottom, top + 1, shape, generator=generator, device=device, dtype=torch.int16
    )
    draws = torch.rand(shape, generator=generator, device=device, dtype=torch.float32)
    for i, extreme in enumerate((bottom, top, 0), start=1):
        codes[(draws < i * _EXTREME_FRACTION) & (draws >= (i - 1) * _EXTREME_FRACTION)] = extreme
    codes[0, : min(k, 128)] = bottom  # the largest possible sum of a group
    exponents = torch.randint(
        _SCALE_EXPONENT,
        _SCALE_EXPONENT + _SCALE_SPREAD,
        (rows, _groups(k, fmt)),
        generator=generator,
        device=device,
    )
    scales = torch.exp2(exponents.float()).half()
    if fmt.kind == "dual" and not fmt.has_zero_points:
        whole = torch.randint(
            1, TOP_SIX_BIT_SCALE + 1, scales.shape, generator=generator, device=device
        )
        values = codes.to(torch.int8)
        return Operand(values, whole.half(), fmt.bits, fmt.group, row_scales=scales[:, :1])
    if fmt.kind == "dual":
        zeros = torch.randint(
            -2 * _DUAL_MIDDLE + 1, 1, scales.shape, generator=generator, device=device
        )
        # The largest scale for which scale · (code + zero point) of every code is within int8.
        most = torch.minimum(
            127 // (2 * _DUAL_MIDDLE - 1 + zeros).clamp(min=1), 128 // (-zeros).clamp(min=1)
        )
        draws = torch.rand(scales.shape, generator=generator, device=device, dtype=torch.float32)
        of_groups = ((draws * most).long() + 1).half()
        up = (codes + _DUAL_MIDDLE).to(torch.int8)
        zero_points = zeros.to(torch.int8)
        return Operand(up, of_groups, fmt.bits, fmt.group, zero_points, row_scales=scales[:, :1])
    if fmt.has_zero_points:
        of_codes, of_zeros = asymmetric_types(fmt.bits)
        zeros = torch.randint(-top, 1, scales.shape, generator=generator, device=device)
        return Operand(codes.to(of_codes), scales, fmt.bits, fmt.group, zeros.to(of_zeros))
    return Operand(codes.to(torch.int8), scales, fmt.bits, fmt.group)


def _for_stage(bound: BoundKernel, x: Operand, w: Operand) -> LinearInputs:
    kernel = bound.kernel
    if bound.case.stage == "gemm":
        return LinearInputs(None, x, w)
    x_real = _with_tops(x, kernel.spec.activation.clip).in_own_order()
    x_real = x_real.to(kernel.spec.input_dtype)
    return LinearInputs(x_real, quantized_activation(kernel, x_real), w)


def _with_tops(x: Operand, clip: float) -> Operand:
    """Codes that quantizing their real values restores: within ±top, with one at the top per group.

    clip: share of a group's range that codes span, for the groups before a mixed operand's last
    one; the value at the top then exceeds the range accordingly.
    """
    start = 0 if x.tail_bits is None else tail_start(x.k)
    values = x.values.double()
    for part, bits, share in (
        (values[:, :start], x.bits, clip),
        (values[:, start:], x.tail_bits or x.bits, 1.0),
    ):
        top = 2 ** (bits - 1) - 1
        part.clamp_(min=-top)
        part[:, :: x.group_length] = top / share
    return replace(x, values=values)


def _plain(operand: Operand) -> Operand:
    """A copy of what a kernel's rule returned, without methods of the kernel's code.

    They could give other values to the reference. Raises KernelError for subclasses.
    """
    for part in (operand, *(getattr(operand, field.name, None) for field in fields(Operand))):
        if type(part) not in (Operand, torch.Tensor, torch.nn.Parameter, int, str, type(None)):
            raise KernelError(
                f"values are quantized to a {type(part).__name__}: return an Operand of plain "
                "tensors"
            )
    return operand.clone()


def _mixed(k: int, draw: Callable[[int, NumberFormat], Operand]) -> Operand:
    """An operand with 8 bits in its last group; draw: returns k columns in a format."""
    start = tail_start(k)
    head = draw(start, NumberFormat(HEAD_BITS, GROUP)) if start else None
    return joined(head, draw(k - start, NumberFormat(TAIL_BITS, GROUP)), default_order(k))


def _limits(fmt: NumberFormat) -> tuple[int, int]:
    """Lowest and highest code; for dual-grained formats minus the code in their middle."""
    low, high = fmt.limits
    middle = _DUAL_MIDDLE if fmt.kind == "dual" and fmt.has_zero_points else 0
    return low - middle, high - middle


def _groups(k: int, fmt: NumberFormat) -> int:
    return 1 if fmt.group is None else -(-k // fmt.group)
