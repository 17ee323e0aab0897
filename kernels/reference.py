"""Reference GEMM in float64 from unpacked codes; every kernel is checked against it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from flexq_bench.kernels.contract import KernelSpec
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import DENSE_TYPES, Operand

_FP32_BITS = 24  # significant bits of an FP32 sum
FP16_BITS, BF16_BITS = 11, 8  # significant bits of a number
_LARGEST = {name: torch.finfo(dtype).max for name, dtype in DENSE_TYPES.items()}
# FP8 tensor cores of Hopper accumulate with around 14 bits (DeepSeek-V3 technical report,
# arXiv 2412.19437, section 3.3.2).
_FP8_SUM_BITS = 16
# Tensor cores truncate a sum after each step of K (Fasi et al., PeerJ Computer Science 7:e330,
# 2021), so the rounding error of a sum of floats grows with the number of terms. An FP16 GEMM of
# cuBLAS on an H100 exceeded the error of 24 bits by up to 1.1 times at K = 28,672; on an H200 it
# never did for K up to 11,008.
_FP32_TERMS = 8192

# W is processed in chunks of rows: the float64 copy of a chunk has at most this many values.
_CHUNK_VALUES = 1 << 26


@dataclass(frozen=True, slots=True)
class Reference:
    """y: float64 [M,N]. magnitude: float64 [M,N], the sum of the absolute values of its terms.

    Terms are the values that a kernel rounds: the contribution of a group if both operands are
    codes and it sums them as integers, which is exact, else each product. The error of an element
    is judged relative to its magnitude, which accounts for cancellation.
    sum_bits: significant bits of the accumulator.
    output_bits: significant bits of the result, 11 for FP16 (and FP32, which is held to no more).
    largest: finite number of the result's type.
    slack: distance within which any result is right: half a step for codes, where y is not rounded.
    """

    y: torch.Tensor
    magnitude: torch.Tensor
    sum_bits: float = _FP32_BITS
    output_bits: int = FP16_BITS
    largest: float = _LARGEST["fp16"]
    slack: float | torch.Tensor = 0.0

    def rounded_to(self, bits: int | None) -> Reference:
        """Return the reference for an implementation that rounds terms and outputs to `bits` bits.

        None: returns this reference. Rounding each term to b bits changes it by at most 2^-b of
        itself, and their sum by at most 2^-b of the magnitude. With a relative tolerance of about
        2^-10, sum_bits = b + 4 allows this error.
        """
        if bits is None:
            return self
        sum_bits, output_bits = min(self.sum_bits, bits + 4), min(self.output_bits, bits)
        return replace(self, sum_bits=sum_bits, output_bits=output_bits)

    def stored_as(self, output: str) -> Reference:
        """Return the reference for results in another type: a key of DENSE_TYPES."""
        bits = BF16_BITS if output == "bf16" else self.output_bits
        return replace(self, output_bits=min(self.output_bits, bits), largest=_LARGEST[output])


def reference_of(spec: KernelSpec, x: Operand, w: Operand) -> Reference:
    """Return the reference of a kernel for X [M,K] · W [N,K]^T, with the rounding of its spec.

    Raises ShapeError as reference_gemm does.
    """
    exact = reference_gemm(x, w, integer_sums=spec.integer_sums)
    return exact.rounded_to(spec.rounds_to).stored_as(spec.output)


def reference_gemm(
    x: Operand, w: Operand, bias: torch.Tensor | None = None, *, integer_sums: bool = True
) -> Reference:
    """X [M,K] · W [N,K]^T (+ bias [N]) in float64 from codes and scales (or dense values).

    integer_sums: see KernelSpec. Raises ShapeError if K differs, or if both have groups and neither
    length divides the other.
    """
    _check(x, w)
    floating = x.values.is_floating_point() or w.values.is_floating_point() or not integer_sums
    # Each product is a term then, and groups have no meaning.
    length, groups = (x.k, 1) if floating else _group_length(x, w)
    x_groups = _in_groups(x.dequantize(), groups, length)
    step = max(1, _CHUNK_VALUES // x.k)
    ys, magnitudes = [], []
    for start in range(0, w.rows, step):
        part = w.slice_rows(start, start + step)
        w_groups = _in_groups(part.dequantize(), groups, length)
        y = torch.zeros(x.rows, part.rows, dtype=torch.float64, device=x.values.device)
        magnitude = torch.zeros_like(y)
        together = max(1, _CHUNK_VALUES // y.numel())  # [groups, M, N] would not fit for large M
        for g in range(0, groups, together):
            x_part, w_part = x_groups[g : g + together], w_groups[g : g + together].mT
            contribution = x_part @ w_part
            y += contribution.sum(0)
            terms = x_part.abs() @ w_part.abs() if floating else contribution.abs()
            magnitude += terms.sum(0)
        ys.append(y)
        magnitudes.append(magnitude)
    y, magnitude = torch.cat(ys, dim=1), torch.cat(magnitudes, dim=1)
    if bias is not None:
        y = y + bias.double()
        magnitude = magnitude + bias.double().abs()
    return Reference(y, magnitude, _sum_bits(x, w) if floating else _FP32_BITS)


def _sum_bits(x: Operand, w: Operand) -> float:
    """Significant bits of a sum of products of floats over all of K."""
    if all(part.values.is_floating_point() and part.values.itemsize == 1 for part in (x, w)):
        return _FP8_SUM_BITS
    return _FP32_BITS - math.log2(max(1.0, x.k / _FP32_TERMS)) / 2


def _in_groups(matrix: torch.Tensor, groups: int, length: int) -> torch.Tensor:
    """[rows, K] as [groups, rows, length], padded with zeros."""
    padded = torch.nn.functional.pad(matrix, (0, groups * length - matrix.shape[1]))
    return padded.view(matrix.shape[0], groups, length).transpose(0, 1)


def _group_length(x: Operand, w: Operand) -> tuple[int, int]:
    length = min(x.group_length, w.group_length)
    return length, -(-x.k // length)


def _check(x: Operand, w: Operand) -> None:
    orders = [operand.order for operand in (x, w)]
    if any(order is not None for order in orders):
        natural = torch.arange(x.k, dtype=torch.int32, device="cpu")
        first, second = (natural if order is None else order.cpu() for order in orders)
        if not torch.equal(first, second):
            raise ShapeError("x and w have their channels in different orders: use one for both")
    if x.k != w.k:
        raise ShapeError(f"x has K={x.k} and w has K={w.k}: both must be the same layer's")
    lengths = sorted((x.group_length, w.group_length))
    if x.group is not None and w.group is not None and lengths[1] % lengths[0]:
        raise ShapeError(f"x has groups of {x.group} and w of {w.group}: one must divide the other")
