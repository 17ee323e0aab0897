"""Moving difficulty from activations to weights: a scale for each channel, folded into the model.

Y = (X / s)(s · W): the input of a layer is divided by s, its weight columns are multiplied with s,
and the model computes what it did. Schemes differ in how they find s:
SmoothQuant (Xiao et al., arXiv 2211.10438, equation 4), DGQ's percentile clipping
(Zhang et al., arXiv 2310.04836, section 3.4); AWQ, OmniQuant and ABQ-LLM search or learn it.

SmoothQuant's own code and optimum fold in the same way, but only for lists of models that they know
by name, and neither gives the feed-forward's last layer a scale, which is where GLU models hurt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flexq_bench.schemes.model_map import SiteInput
from flexq_bench.schemes.rotation import Rotation

_SMALLEST = 1e-5  # of a magnitude, so that a channel that is never used gets a finite scale


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
        """Return a layer's input in the folded model for the original's [..., K], in its dtype."""
        transformed = x / self.inputs[name] if name in self.inputs else x
        if name in self.rotated_inputs:
            transformed = self.rotated_inputs[name].apply(transformed)
        return transformed.to(x.dtype)

    def unfold_input(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The original's input [..., K] instead of what a layer gets, in its dtype."""
        transformed = self.rotated_inputs[name].undo(x) if name in self.rotated_inputs else x
        return (transformed * self.inputs.get(name, 1.0)).to(x.dtype)

    def fold_output(self, name: str, y: torch.Tensor) -> torch.Tensor:
        """Return a layer's output in the folded model for the original's [..., N], in its dtype."""
        transformed = self.rotated_outputs[name].apply(y) if name in self.rotated_outputs else y
        return (transformed / self.outputs.get(name, 1.0)).to(y.dtype)

    def unfold_output(self, name: str, y: torch.Tensor) -> torch.Tensor:
        """The original's output [..., N] instead of what a layer gives."""
        transformed = y * self.outputs.get(name, 1.0)
        return (
            self.rotated_outputs[name].undo(transformed)
            if name in self.rotated_outputs
            else transformed
        )


def smoothquant_scale(inputs: torch.Tensor, weights: torch.Tensor, alpha: float) -> torch.Tensor:
    """s = max|X|^alpha / max|W|^(1 - alpha) of each channel [K] (arXiv 2211.10438, equation 4).

    inputs, weights: largest magnitude in each channel [K]. alpha: share of the difficulty that goes
    to the weights, 0 … 1.
    """
    return inputs.clamp(min=_SMALLEST) ** alpha / weights.clamp(min=_SMALLEST) ** (1 - alpha)


def percentile_scale(inputs: torch.Tensor, share: float = 0.005) -> torch.Tensor:
    """s [K] that clips the channels with the largest `share` of magnitudes to the next one's.

    inputs: largest magnitude in each channel [K]. All other channels keep a scale of 1, so their
    weights stay as they are (arXiv 2310.04836, section 3.4; 0.5 % there).
    """
    largest = inputs.clamp(min=_SMALLEST)
    kept = largest.numel() - max(1, round(share * largest.numel()))
    threshold = largest.sort().values[max(kept - 1, 0)]
    return (largest / threshold).clamp(min=1)


def spread(scale: torch.Tensor, site_input: SiteInput, head_dim: int) -> torch.Tensor:
    """A scale of the source's channels as one of the channels that its readers see."""
    if site_input.shared_heads == 1:
        return scale
    return scale.view(-1, head_dim).repeat_interleave(site_input.shared_heads, dim=0).flatten()


def gather(values: torch.Tensor, site_input: SiteInput, head_dim: int) -> torch.Tensor:
    """The largest of the values [K] that readers see of each channel of the source."""
    if site_input.shared_heads == 1:
        return values
    return values.view(-1, site_input.shared_heads, head_dim).amax(dim=1).flatten()


def check_share(name: str, value: float) -> None:
    """Raises ValueError unless 0 <= value <= 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is a share, 0 … 1, got {value}")


@contextmanager
def unrounded(block: nn.Module) -> Iterator[None]:
    """The block in FP32 while it is scaled and quantized, then in its own dtype again.

    A weight of 0.01 divided by a scale of 1000 has lost most of its bits in FP16; this way weights
    are rounded once, to their codes.
    """
    kept = next(block.parameters()).dtype
    block.float()
    try:
        yield
    finally:
        block.to(kept)


@torch.no_grad()
def fold(
    source: Any,
    readers: list[nn.Linear],
    site_input: SiteInput,
    scale: torch.Tensor,
    *,
    norm_offset: float = 0.0,
    head_dim: int = 1,
) -> None:
    """Divide the source's channels by `scale` and multiply the readers' columns with it, in place.

    source: a norm module, or the nn.Linear whose rows are the channels. scale: of its channels.
    norm_offset: what the norm adds to its weight. head_dim: needed for shared heads.
    Raises ValueError if a scale isn't a positive number.
    """
    if not bool(((scale > 0) & torch.isfinite(scale)).all()):
        raise ValueError("a smoothing scale must be above 0 and finite: look at the calibration")
    weight, bias = source.weight, getattr(source, "bias", None)
    s = scale.to(weight)
    if site_input.through == "norm":
        weight.copy_((weight + norm_offset) / s - norm_offset)
    else:
        weight.div_(s[:, None])
    if bias is not None:
        bias.div_(s)
    seen = spread(s, site_input, head_dim)
    for reader in readers:
        reader.weight.mul_(seen)
