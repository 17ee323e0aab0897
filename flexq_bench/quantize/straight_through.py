"""Rounding that a gradient passes: forward it rounds, backward it is the identity.

The straight-through estimator, as OmniQuant (arXiv 2308.13137, section 3.2) and ABQ-LLM
(arXiv 2408.08554) train with. Formats are those of kernels.formats with signed codes; scales are
rounded to FP16 as kernels store them, and take part in the gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.quantize.errors import QuantizeError
from kernels.formats import NumberFormat
from kernels.formats.grouping import in_groups, safe_divisor


class _Through(torch.autograd.Function):
    """Exact, unlike values + (rounded - values), which rounds once more."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def through(values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """`rounded`, with the gradient of `values`."""
    result: torch.Tensor = _Through.apply(values, rounded.detach())  # type: ignore[no-untyped-call]
    return result


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
    """
    rows, k = values.shape
    grouped = in_groups(values, number.group)
    top = 2 ** (number.bits - 1) - (0 if number.kind == "balanced" else 1)
    reach = grouped.abs().amax(dim=-1, keepdim=True) * number.clip
    if shares is not None:
        reach = reach * shares.unsqueeze(-1)
    scales = through(reach / top, (reach / top).to(torch.float16).to(values.dtype))
    unit = grouped / safe_divisor(scales, values.dtype)
    codes = through(unit, torch.round(unit)).clamp(-(2 ** (number.bits - 1)), top)
    return (codes * scales).reshape(rows, -1)[:, :k]
