"""Quantizers of a layer's input. They round like the kernels: FP16 to code times scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.kernels.formats import NumberFormat, Scaling


@dataclass(frozen=True, slots=True)
class DynamicActivation:
    """Dynamic quantization: scales of each token (and group) are computed from its values."""

    format: NumberFormat

    @property
    def kernel_format(self) -> NumberFormat:
        """Format that a kernel must round its input to."""
        return self.format

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Round x [tokens, K], FP32. Raises ValueError for NaN, infinity, or values beyond FP16."""
        return self.format.round(x.to(torch.float16))


@dataclass(frozen=True, slots=True)
class StaticActivation:
    """Static quantization: one scale for all tokens and channels, determined in calibration.

    zero: the code of the value 0, for asymmetric formats.
    """

    format: NumberFormat
    scale: float
    zero: int | None = None

    @property
    def kernel_format(self) -> None:
        """None: no kernel has one scale for all tokens."""
        return None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Round x [tokens, K], FP32; values beyond the calibrated range saturate."""
        work = x.to(torch.float16).to(torch.float32)
        if not bool(torch.isfinite(work).all()):
            raise ValueError("cannot quantize NaN or infinity: find out where the input got them")
        scale = torch.tensor([self.scale], dtype=torch.float16, device=x.device)
        zeros = None if self.zero is None else torch.tensor([-float(self.zero)], device=x.device)
        rounder = self.format.rounder(Scaling(scale, zeros), work.dtype)
        return rounder.values(rounder.codes(work))


ActivationQuantizer = DynamicActivation | StaticActivation


def dynamic(number: NumberFormat | None) -> DynamicActivation | None:
    """Return the dynamic quantizer to a format; None for None and for dense formats."""
    return None if number is None or number.is_dense else DynamicActivation(number)
