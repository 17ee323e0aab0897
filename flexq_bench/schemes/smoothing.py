"""Smoothing: a scale for each channel moves difficulty from activations to weights.

Y = (X / s)(s · W): the input of a layer is divided by s and its weight columns are multiplied by s,
so that the model's output does not change. Schemes differ in the choice of s: SmoothQuant (Xiao et
al., arXiv 2211.10438, equation 4) and DGQ's percentile clipping (Zhang et al., arXiv 2310.04836,
section 3.4) compute it; AWQ, OmniQuant and ABQ-LLM search or learn it.

SmoothQuant's own code and optimum fold scales in the same way, but only for a fixed list of models.
Neither scales the input of the feed-forward's last layer, which is the most difficult one in GLU
models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flexq_bench.schemes.channels import SiteInput
from flexq_bench.schemes.rotation import Rotation

_SMALLEST = 1e-5  # smallest magnitude, so that the scale of an unused channel is finite


@dataclass(frozen=True, slots=True)
class Folds:
    """Scales and rotations folded into a model, by full name of a linear layer; scales are float64.

    inputs: divisors of a layer's inputs [K]. outputs: divisors of its outputs [N].
    rotated_inputs: rotations of its inputs, applied after the division. rotated_outputs: rotations
    of its outputs, applied before the division.
    """

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    rotated_inputs: dict[str, Rotation] = field(default_factory=dict)
    rotated_outputs: dict[str, Rotation] = field(default_factory=dict)

    def fold_input(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Convert a layer's input [..., K] from the original to the folded model, in its dtype."""
        result = x / self.inputs[name] if name in self.inputs else x
        if name in self.rotated_inputs:
            result = self.rotated_inputs[name].apply(result)
        return result.to(x.dtype)

    def unfold_input(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Convert a layer's input [..., K] from the folded to the original model, in its dtype."""
        result = self.rotated_inputs[name].undo(x) if name in self.rotated_inputs else x
        return (result * self.inputs.get(name, 1.0)).to(x.dtype)

    def fold_output(self, name: str, y: torch.Tensor) -> torch.Tensor:
        """Convert a layer's output [..., N] from the original to the folded model, in its dtype."""
        result = self.rotated_outputs[name].apply(y) if name in self.rotated_outputs else y
        return (result / self.outputs.get(name, 1.0)).to(y.dtype)

    def unfold_output(self, name: str, y: torch.Tensor) -> torch.Tensor:
        """Convert a layer's output [..., N] from the folded to the original model."""
        result = y * self.outputs.get(name, 1.0)
        return self.rotated_outputs[name].undo(result) if name in self.rotated_outputs else result


def smoothquant_scale(inputs: torch.Tensor, weights: torch.Tensor, alpha: float) -> torch.Tensor:
    """s = max|X|^alpha / max|W|^(1 - alpha) of each channel [K] (arXiv 2211.10438, equation 4).

    inputs, weights: largest magnitude in each channel [K]. alpha: share of the difficulty that is
    moved to the weights, 0 … 1.
    """
    return inputs.clamp(min=_SMALLEST) ** alpha / weights.clamp(min=_SMALLEST) ** (1 - alpha)


def percentile_scale(inputs: torch.Tensor, share: float = 0.005) -> torch.Tensor:
    """s [K] that clips the channels with the largest `share` of magnitudes to the next smaller one.

    inputs: largest magnitude in each channel [K]. All other channels have the scale 1, so their
    weights don't change (arXiv 2310.04836, section 3.4; 0.5 % there).
    """
    largest = inputs.clamp(min=_SMALLEST)
    kept = largest.numel() - max(1, round(share * largest.numel()))
    threshold = largest.sort().values[max(kept - 1, 0)]
    return (largest / threshold).clamp(min=1)


def spread(scale: torch.Tensor, site_input: SiteInput) -> torch.Tensor:
    """Expand a scale of the source's channels to the channels that its readers see."""
    if site_input.shared_heads == 1:
        return scale
    return (
        scale.view(-1, site_input.head_dim)
        .repeat_interleave(site_input.shared_heads, dim=0)
        .flatten()
    )


def gather(values: torch.Tensor, site_input: SiteInput) -> torch.Tensor:
    """Reduce values [K] of the readers' channels to the source's channels, by the maximum."""
    if site_input.shared_heads == 1:
        return values
    return values.view(-1, site_input.shared_heads, site_input.head_dim).amax(dim=1).flatten()


def check_share(name: str, value: float) -> None:
    """Raise ValueError unless 0 <= value <= 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is a share, 0 … 1, got {value}")


@contextmanager
def unrounded(block: nn.Module) -> Iterator[None]:
    """Hold the block in FP32 while it is scaled and quantized, then restore its dtype.

    In FP16 a weight of 0.01 divided by a scale of 1000 would lose most of its bits. In FP32 weights
    are rounded only once, to their codes.
    """
    dtype = next(block.parameters()).dtype
    block.float()
    try:
        yield
    finally:
        block.to(dtype)


@torch.no_grad()
def fold(
    source: Any,
    readers: list[nn.Linear],
    site_input: SiteInput,
    scale: torch.Tensor,
) -> None:
    """Divide the source's channels by `scale` and multiply the readers' columns by it, in place.

    source: a norm module, or the nn.Linear whose rows are the channels. scale: of its channels.
    Raises ValueError if a scale isn't a positive number.
    """
    if not bool(((scale > 0) & torch.isfinite(scale)).all()):
        raise ValueError("a smoothing scale must be above 0 and finite: look at the calibration")
    weight, bias = source.weight, getattr(source, "bias", None)
    s = scale.to(weight)
    if site_input.through == "norm":
        weight.copy_((weight + site_input.norm_offset) / s - site_input.norm_offset)
    else:
        weight.div_(s[:, None])
    if bias is not None:
        bias.div_(s)
    divisor = spread(s, site_input)
    for reader in readers:
        reader.weight.mul_(divisor)
