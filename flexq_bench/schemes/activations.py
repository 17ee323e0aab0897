"""Quantizers of a layer's input, which round as its kernel does: FP16 to code times scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.errors import ShapeError
from kernels.formats import NumberFormat, Scaling
from kernels.formats.mixed import HEAD_BITS, TAIL_BITS, tail_start


@dataclass(frozen=True, slots=True)
class DynamicActivation:
    """Scales of each token (and group) from its own values."""

    format: NumberFormat

    @property
    def kernel_format(self) -> NumberFormat:
        """Format that a kernel must round its input to."""
        return self.format

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, K] rounded, FP32. Raises ValueError for NaN, infinity, or what FP16 lacks."""
        return self.format.round(x.to(torch.float16))


@dataclass(frozen=True, slots=True)
class StaticActivation:
    """One scale for all tokens and channels, found in calibration. zero: for asymmetric formats."""

    format: NumberFormat
    scale: float
    zero: int | None = None

    @property
    def kernel_format(self) -> None:
        """None: no kernel has one scale for all tokens."""
        return None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, K] rounded, FP32; what lies beyond the calibrated range saturates."""
        work = x.to(torch.float16).to(torch.float32)
        if not bool(torch.isfinite(work).all()):
            raise ValueError("cannot quantize NaN or infinity: find out where the input got them")
        scale = torch.tensor([self.scale], dtype=torch.float16, device=x.device)
        zeros = None if self.zero is None else torch.tensor([float(self.zero)], device=x.device)
        return self.format.snap(work, Scaling(scale, zeros))


@dataclass(frozen=True, slots=True)
class MixedActivation:
    """Neighbouring channels in different formats (Atom: 4 bits, then 8 for the outliers).

    widths: channels of each part, in order; together K. parts: None leaves a part in FP16.
    """

    widths: tuple[int, ...]
    parts: tuple[DynamicActivation | StaticActivation | None, ...]

    @property
    def kernel_format(self) -> NumberFormat | None:
        """Atom's: groups in 4 bits, then one group in 8; None: other parts than kernels have."""
        match self.parts:
            case (DynamicActivation(head), DynamicActivation(tail)) if (
                head.bits == HEAD_BITS
                and tail.bits == TAIL_BITS
                and head.group is not None
                and self.widths[1] == sum(self.widths) - tail_start(sum(self.widths), head.group)
            ):
                return NumberFormat(HEAD_BITS, head.group, "mixed", head.clip)
        return None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, K] rounded, FP32. Raises ShapeError if the widths are not those of K."""
        if sum(self.widths) != x.shape[-1] or len(self.widths) != len(self.parts):
            raise ShapeError(f"widths {self.widths} in {len(self.parts)} parts, K={x.shape[-1]}")
        pieces = torch.split(x, list(self.widths), dim=-1)
        rounded = [
            piece.to(torch.float16).to(torch.float32) if part is None else part(piece)
            for part, piece in zip(self.parts, pieces, strict=True)
        ]
        return torch.cat(rounded, dim=-1)


ActivationQuantizer = DynamicActivation | StaticActivation | MixedActivation
