"""Quantizers of a layer's input. They round like the kernels: FP16 to code times scale."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flexq_bench.kernels.formats import NumberFormat, Scaling
from flexq_bench.kernels.formats.grouping import check_finite


@dataclass(frozen=True, slots=True)
class DynamicActivation:
    """Dynamic quantization: scales of each token (and group) are computed from its values.

    matrix_scale: of formats with E4M3 scales, from calibration; None: computed from all tokens.
    bound: largest magnitude; None: there is none. Larger values saturate.
    """

    format: NumberFormat
    matrix_scale: float | None = None
    bound: float | None = None

    @property
    def kernel_format(self) -> NumberFormat | None:
        """Format that a kernel must round its input to; None: a scale or bound is given."""
        return self.format if self.matrix_scale is None and self.bound is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Round x [tokens, K], FP32. Raises ValueError for NaN, infinity, or values beyond FP16."""
        halves = x.to(torch.float16)
        if self.bound is not None:
            halves = halves.clamp(-self.bound, self.bound)
        return self.format.round(halves, self.matrix_scale)


@dataclass(frozen=True, slots=True)
class StaticActivation:
    """Static quantization: one scale for all tokens and channels, determined in calibration.

    zero: the code of the value 0, for asymmetric formats.
    """

    format: NumberFormat
    scale: float
    zero: int | None = None

    @property
    def kernel_format(self) -> NumberFormat | None:
        """Format of all tokens together; None: no kernel has zero points of activations."""
        return None if self.zero is not None else of_all_tokens(self.format)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Round x [tokens, K], FP32; values beyond the calibrated range saturate."""
        halves = x.to(torch.float16)
        check_finite(halves)
        work = halves.to(torch.float64)  # no quotient by the scale is rounded across a tie
        scale = torch.tensor([self.scale], dtype=torch.float64, device=x.device)
        zeros = None if self.zero is None else torch.tensor([-float(self.zero)], device=x.device)
        rounder = self.format.rounder(Scaling(scale, zeros), work.dtype)
        return rounder.values(rounder.codes(work)).to(torch.float32)


@dataclass(frozen=True, slots=True)
class OutlierActivation:
    """Dynamic quantization except for columns with large values (LLM.int8(), arXiv 2208.07339).

    Columns of x [tokens, K] with a magnitude of at least `threshold` stay FP16; scales are computed
    from the others. threshold 0: all are quantized.
    """

    format: NumberFormat
    threshold: float

    @property
    def kernel_format(self) -> NumberFormat | None:
        """Format that a kernel must round its input to; None: no kernel excepts columns."""
        return self.format if self.threshold == 0 else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Round x [tokens, K], FP32. Raises ValueError for NaN, infinity, or values beyond FP16."""
        halves = x.to(torch.float16)
        if self.threshold == 0:
            return self.format.round(halves)
        check_finite(halves)
        outliers = (halves.abs() >= self.threshold).any(dim=0)
        rounded = self.format.round(halves.masked_fill(outliers, 0))
        return torch.where(outliers, halves.float(), rounded)


@dataclass(frozen=True, slots=True)
class SplitActivation:
    """Dynamic quantization in two formats: columns up to `start`, and the outliers after them.

    outliers: None: they stay FP16.
    """

    format: NumberFormat
    outliers: NumberFormat | None
    start: int

    @property
    def kernel_format(self) -> NumberFormat | None:
        """None: no kernel combines the two."""
        return None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Round x [tokens, K], FP32. Raises ValueError for NaN, infinity, or values beyond FP16."""
        halves = x.to(torch.float16)
        check_finite(halves)
        tail = halves[:, self.start :]
        last = tail.float() if self.outliers is None else self.outliers.round(tail)
        head = halves[:, : self.start]
        return torch.cat([self.format.round(head), last], dim=1) if self.start else last


ActivationQuantizer = DynamicActivation | StaticActivation | OutlierActivation | SplitActivation


def of_all_tokens(number: NumberFormat) -> NumberFormat:
    """Return the format with one scale for a whole matrix."""
    return replace(number, group=None, block_rows=None, scale="")


def dynamic(number: NumberFormat | None) -> DynamicActivation | None:
    """Return the dynamic quantizer to a format; None for None and for dense formats."""
    return None if number is None or number.is_dense else DynamicActivation(number)
