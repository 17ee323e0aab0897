"""Straight-through rounding: the forward pass rounds, the gradient is that of the identity.

The straight-through estimator, as in the training of OmniQuant (arXiv 2308.13137, section 3.2) and
ABQ-LLM (arXiv 2408.08554). The forward pass is FlexQ's quantization formula
(`kernels.formats.symmetric_quantization`), in the dtype of the values. Scales are rounded to FP16,
as kernels store them, and take part in the gradient. Weights may also have zero points
(`kernels.formats.asymmetric`); both ends of a range are then learned (OmniQuant, equation 2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.kernels.formats.fused_rounding import LONGEST_GROUP, launch_shape
from flexq_bench.kernels.formats.grouping import in_groups, safe_divisor
from flexq_bench.kernels.formats.symmetric_quantization import group_scales, nearest_codes_, scaled
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.training_kernels import kernels_for


def check_signed(number: NumberFormat) -> None:
    """Raise QuantizeError if a format has a zero point or is a float."""
    if number.kind not in ("symmetric", "balanced"):
        raise QuantizeError(
            f"learned schemes round activations to signed integers, not {number.name}: take wXaY"
        )


def fake_quantize(
    values: torch.Tensor, number: NumberFormat, shares: torch.Tensor | None = None
) -> torch.Tensor:
    """Round values [rows, K] in the format `number`, differentiably.

    shares: [rows, groups], the share of a group's range that its codes span (learned clipping);
    with zero points [rows, groups, 2], see kernels.formats.quantize. None: all of the range.
    Without shares this equals number.round, except for ties, which depend on FP32 rounding.

    On a GPU with Triton, FP32 values are rounded in one kernel and their gradient is computed in
    another; otherwise a training step of a small model has hundreds of launches.
    """
    rows, k = values.shape
    limits = number.limits
    if number.kind == "asymmetric":
        with_zeros = _with_zero_points(in_groups(values, number.group), number, shares)
        return with_zeros.reshape(rows, -1)[:, :k]
    length = min(number.group or k, k)
    if length <= LONGEST_GROUP and kernels_for(values) is not None:
        fused: torch.Tensor = _Fused.apply(values, shares, length, limits, number.clip)  # type: ignore[no-untyped-call]
        return fused
    per_group = None if shares is None else shares.unsqueeze(-1)
    grouped = in_groups(values, number.group)
    rounded: torch.Tensor = _Rounded.apply(grouped, per_group, limits, number.clip)  # type: ignore[no-untyped-call]
    return rounded.reshape(rows, -1)[:, :k]


def _with_zero_points(
    x: torch.Tensor, number: NumberFormat, shares: torch.Tensor | None
) -> torch.Tensor:
    """Round x [rows, groups, length] by the formula of `kernels.formats.asymmetric`."""
    below = 1.0 if shares is None else shares[..., :1]
    above = 1.0 if shares is None else shares[..., 1:]
    top = number.limits[1]
    low = x.amin(dim=-1, keepdim=True).clamp_max(0) * number.clip * below
    high = x.amax(dim=-1, keepdim=True).clamp_min(0) * number.clip * above
    scales = _passed((high - low) / top, lambda exact: exact.to(torch.float16).to(x.dtype))
    divisor = safe_divisor(scales, x.dtype)
    zero_points = _passed(low / divisor, torch.round).clamp(-top, 0)
    codes = (_passed(x / divisor, torch.round) - zero_points).clamp(0, top)
    return (codes + zero_points) * scales


def _passed(exact: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the rounded values, with the gradient of the exact ones."""
    passed: torch.Tensor = _StraightThrough.apply(exact, rounding(exact.detach()))  # type: ignore[no-untyped-call]
    return passed


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], None


class _Rounded(torch.autograd.Function):
    """code times scale of values x [rows, groups, length], as one step of the graph.

    With s = max|x| · clip · share / top and codes c = clamp(round(x / s)), the straight-through
    gradient is that of s · clamp(x / s): dy/dx = 1 within the codes' range and 0 beyond, dy/ds = c
    - x / s within and c beyond. As a chain of torch operations it would take four times as many
    launches, which limit the training of a small model.
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
        scales = group_scales(largest, limits[1], share).to(x.dtype)
        quotients = scaled(x, scales)
        codes = nearest_codes_(quotients.clone(), limits)
        ctx.save_for_backward(x, shares, largest, scales, quotients, codes)
        ctx.top, ctx.clip = limits[1], clip
        return codes * scales

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradients[0]
        x, shares, largest, scales, quotients, codes = ctx.saved_tensors
        within = gradient * ((quotients.round() == codes) & (scales != 0))
        to_reach = (gradient * codes - within * quotients).sum(dim=-1, keepdim=True) / ctx.top
        to_shares = None
        if shares is None:
            to_largest = to_reach * ctx.clip
        else:
            to_shares = to_reach * (largest * ctx.clip)
            to_largest = to_reach * (shares * ctx.clip)
        if not ctx.needs_input_grad[0]:
            return None, to_shares, None, None
        at_largest = x.abs() == largest  # values with the same largest magnitude share its gradient
        to_largest = to_largest / at_largest.sum(dim=-1, keepdim=True)
        return within + at_largest * x.sign() * to_largest, to_shares, None, None


class _Fused(torch.autograd.Function):
    """_Rounded for values x [rows, K] in groups of `length`, by two Triton kernels."""

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
    """Run a kernel of triton_training over all groups of x [rows, K]."""
    length, limits, clip = how
    rows, k = x.shape
    grid, block, together = launch_shape(rows, k, length)
    kernel: Any = getattr(kernels_for(x), name)
    kernel[grid](
        x,
        x if shares is None else shares,
        *tensors,
        rows,
        k,
        grid[1],
        clip,
        float(limits[1]),
        float(limits[0]),
        shared=shares is not None,
        length=length,
        block=block,
        together=together,
    )
