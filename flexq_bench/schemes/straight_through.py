"""Rounding that a gradient passes: forward it rounds, backward it is the identity.

The straight-through estimator, as OmniQuant (arXiv 2308.13137, section 3.2) and ABQ-LLM
(arXiv 2408.08554) train with. Formats are those of kernels.formats with signed codes; scales are
rounded to FP16 as kernels store them, and take part in the gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fused import kernels_for
from kernels.formats import NumberFormat
from kernels.formats.grouping import in_groups, safe_divisor

_LONGEST_GROUP = 8192  # values that a program of the fused kernels holds in registers
_VALUES_A_PROGRAM = 2048


def check_signed(number: NumberFormat) -> None:
    """Raises QuantizeError if the format has a zero point or is a float."""
    if number.kind not in ("symmetric", "balanced"):
        raise QuantizeError(
            f"learned schemes round to signed integers, not {number.name}: take wXaY or w2*aY"
        )


def fake_quantize(
    values: torch.Tensor, number: NumberFormat, shares: torch.Tensor | None = None
) -> torch.Tensor:
    """Values [rows, K] as `number` rounds them, differentiable.

    shares: [rows, groups], what the codes of each group span of its range (learned clipping);
    None: all of it. Equals number.round where shares is None, but for ties that FP32 decides.

    FP32 on a GPU is rounded in one pass where Triton is there, and its gradient found in another:
    one step of training a small model has hundreds of launches otherwise.
    """
    rows, k = values.shape
    top = 2 ** (number.bits - 1) - (0 if number.kind == "balanced" else 1)
    limits = (-(2 ** (number.bits - 1)), top)
    length = min(number.group or k, k)
    if length <= _LONGEST_GROUP and kernels_for(values) is not None:
        fused: torch.Tensor = _Fused.apply(values, shares, length, limits, number.clip)  # type: ignore[no-untyped-call]
        return fused
    per_group = None if shares is None else shares.unsqueeze(-1)
    grouped = in_groups(values, number.group)
    rounded: torch.Tensor = _Rounded.apply(grouped, per_group, limits, number.clip)  # type: ignore[no-untyped-call]
    return rounded.reshape(rows, -1)[:, :k]


class _Rounded(torch.autograd.Function):
    """code times scale of values x [rows, groups, length], in one step of the graph.

    With s = max|x| · clip · share / top and codes c = clamp(round(x / s)), the gradient that
    rounding lets pass is that of s · clamp(x / s): dy/dx = 1 within the codes' range and 0 beyond,
    dy/ds = c - x / s within and c beyond. As a chain of torch's own functions it takes four times
    as many launches, which is what training a small model waits for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        shares: torch.Tensor | None,
        limits: tuple[int, int],
        clip: float,
    ) -> torch.Tensor:
        largest = x.abs().amax(dim=-1, keepdim=True)
        share = clip if shares is None else shares * clip
        # Not by a number: a GPU then multiplies by its reciprocal, which rounds otherwise.
        reach = largest * share / torch.full_like(largest, limits[1])
        scales = reach.to(torch.float16).to(x.dtype)
        unit = x / safe_divisor(scales, x.dtype)
        codes = unit.round().clamp_(*limits)
        ctx.save_for_backward(x, shares, largest, scales, unit, codes)
        ctx.top, ctx.clip = limits[1], clip
        return codes * scales

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradients[0]
        x, shares, largest, scales, unit, codes = ctx.saved_tensors
        within = gradient * ((unit.round() == codes) & (scales != 0))
        to_reach = (gradient * codes - within * unit).sum(dim=-1, keepdim=True) / ctx.top
        to_shares = None
        if shares is None:
            to_largest = to_reach * ctx.clip
        else:
            to_shares = to_reach * (largest * ctx.clip)
            to_largest = to_reach * (shares * ctx.clip)
        if not ctx.needs_input_grad[0]:
            return None, to_shares, None, None
        at_largest = (
            x.abs() == largest
        )  # values that share the largest magnitude share its gradient
        to_largest = to_largest / at_largest.sum(dim=-1, keepdim=True)
        return within + at_largest * x.sign() * to_largest, to_shares, None, None


class _Fused(torch.autograd.Function):
    """What _Rounded computes, for values x [rows, K] in groups of `length`, by two kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        shares: torch.Tensor | None,
        length: int,
        limits: tuple[int, int],
        clip: float,
    ) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, None if shares is None else shares.contiguous())
        ctx.how = length, limits, clip
        rounded = torch.empty_like(x)
        _launch("round_forward", x, shares, (rounded,), ctx.how)
        return rounded

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, shares = ctx.saved_tensors
        to_x = torch.empty_like(x)
        to_shares = None if shares is None else torch.empty_like(shares)
        tensors = (gradients[0].contiguous(), to_x, x if to_shares is None else to_shares)
        _launch("round_backward", x, shares, tensors, ctx.how)
        return (to_x if ctx.needs_input_grad[0] else None), to_shares, None, None, None


def _launch(
    name: str,
    x: torch.Tensor,
    shares: torch.Tensor | None,
    tensors: tuple[torch.Tensor, ...],
    how: tuple[int, tuple[int, int], float],
) -> None:
    """Run a kernel of triton_kernels over all groups of x [rows, K]."""
    length, limits, clip = how
    rows, k = x.shape
    groups, block = -(-k // length), 1 << (length - 1).bit_length()
    together = max(1, _VALUES_A_PROGRAM // block)
    kernel: Any = getattr(kernels_for(x), name)
    kernel[(-(-rows // together), groups)](
        x,
        x if shares is None else shares,
        *tensors,
        rows,
        k,
        groups,
        clip,
        float(limits[1]),
        float(limits[0]),
        shared=shares is not None,
        length=length,
        block=block,
        together=together,
    )
