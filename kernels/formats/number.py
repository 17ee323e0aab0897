"""One description of every number format that a scheme may ask for.

A format says how values that share a scale become codes, and what the codes stand for. Symmetric
integers are those of `symmetric`, which kernels take; asymmetric ones add a zero point, balanced
ones a code (ABQ-LLM's bit balance, arXiv:2408.08554, section 3.3), and small floats are the FP6 and
FP5 of ZeroQuant(4+2) (arXiv:2312.08583, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.errors import ShapeError
from kernels.formats import fused
from kernels.formats.grouping import (
    check_finite,
    check_shape,
    in_groups,
    safe_divisor,
    work_dtype,
)
from kernels.formats.minifloat import LARGEST, nearest_minifloat
from kernels.formats.symmetric import check_bits, scales_to

Kind = Literal["symmetric", "asymmetric", "balanced", "e3m2", "e3m1"]
_FLOAT_BITS = {"e3m2": 6, "e3m1": 5}
_LETTERS = {"symmetric": "int", "asymmetric": "uint", "balanced": "balanced"}


@dataclass(frozen=True, slots=True)
class Scaling:
    """What turns codes of a group into values. scales: FP16 [..., 1].

    zeros: the code that stands for 0, [..., 1], in the dtype of the values that were fitted;
    None: the format has no zero point.
    """

    scales: torch.Tensor
    zeros: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """`bits` a value, one FP16 scale per `group` of k (None: a row, that is a channel or a token).

    kind: balanced has one code more than 2^bits, so that codes are symmetric about zero, for
          example {-2, -1, 0, 1, 2} for two bits.
    clip: share of a group's range that the codes span; what is beyond saturates.

    Raises ShapeError if the bits and the kind contradict each other, a group has no value or clip
    is not in (0, 1].
    """

    bits: int
    group: int | None = None
    kind: Kind = "symmetric"
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.kind in _FLOAT_BITS:
            if self.bits != _FLOAT_BITS[self.kind]:
                raise ShapeError(f"{self.kind} has {_FLOAT_BITS[self.kind]} bits, got {self.bits}")
        else:
            check_bits(self.bits)
        if self.group is not None and self.group < 1:
            raise ShapeError(f"a group needs at least one value, got {self.group}")
        if not 0 < self.clip <= 1:
            raise ShapeError(f"clip is a share of the range, above 0 and at most 1: {self.clip}")

    @property
    def name(self) -> str:
        """`int6/128`, `uint4/row` (asymmetric), `e3m2/row`."""
        letters = _LETTERS.get(self.kind)
        number = self.kind if letters is None else f"{letters}{self.bits}"
        return f"{number}/{'row' if self.group is None else self.group}"

    def fit(self, grouped: torch.Tensor) -> Scaling:
        """Scaling of values [..., length] that share a scale.

        Raises ValueError if FP16 can't carry a scale.
        """
        if self.kind == "asymmetric":
            return self._fit_asymmetric(grouped)
        largest = LARGEST[self.bits] if self.kind in _FLOAT_BITS else self._limits[1]
        return Scaling(scales_to(grouped, largest, self.clip))

    def snapper(
        self, scaling: Scaling, dtype: torch.dtype
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """What takes values [..., length] of this dtype to the nearest representable numbers.

        A code times its scale is exact in FP32: 9 significant bits at most, and 11.
        """
        divisor = safe_divisor(scaling.scales, dtype)
        factor = scaling.scales.to(dtype)
        zeros = None if scaling.zeros is None else scaling.zeros.to(dtype)
        low, high = self._limits

        def snap_float(values: torch.Tensor) -> torch.Tensor:
            return nearest_minifloat(values / divisor, self.bits).to(dtype).mul_(factor)

        def snap_integer(values: torch.Tensor) -> torch.Tensor:
            codes = (values / divisor).round_()
            if zeros is None:
                return codes.clamp_(low, high).mul_(factor)
            return codes.add_(zeros).clamp_(low, high).sub_(zeros).mul_(factor)

        return snap_float if self.kind in _FLOAT_BITS else snap_integer

    def snap(self, values: torch.Tensor, scaling: Scaling) -> torch.Tensor:
        """The nearest representable numbers of values [..., length], in their dtype."""
        return self.snapper(scaling, values.dtype)(values)

    def round(self, matrix: torch.Tensor) -> torch.Tensor:
        """Round [rows, K] to nearest, group by group: FP32 [rows, K], code times scale, exact.

        For symmetric integers it equals quantize_symmetric(...).dequantize().
        Raises ShapeError for no matrix, and ValueError if it holds NaN or infinity or as `fit`.
        """
        check_shape(matrix, self.group)
        rows, k = matrix.shape
        if self.kind in ("symmetric", "balanced") and fused.takes(matrix):
            found = fused.round_symmetric(matrix, self.group, self._limits, self.clip)
            if found is not None and math.isfinite(float(found[1].amax())):
                return found[0]
        grouped = in_groups(matrix.to(work_dtype(matrix)), self.group)
        try:
            scaling = self.fit(grouped)
        except ValueError:
            check_finite(matrix)  # NaN and infinity give no scale either, for a reason of their own
            raise
        snapped = self.snap(grouped, scaling)
        return snapped.view(rows, -1)[:, :k].to(torch.float32).contiguous()

    @property
    def _limits(self) -> tuple[int, int]:
        """Lowest and highest integer code."""
        half: int = 2 ** (self.bits - 1)
        if self.kind == "asymmetric":
            return 0, 2 * half - 1
        return -half, half if self.kind == "balanced" else half - 1

    def _fit_asymmetric(self, grouped: torch.Tensor) -> Scaling:
        top = self._limits[1]
        # Zero is always in the range, so that it is exact: padding and masked tokens stay zero.
        low = grouped.amin(dim=-1, keepdim=True).clamp_max(0) * self.clip
        high = grouped.amax(dim=-1, keepdim=True).clamp_min(0) * self.clip
        scales = ((high - low) / top).to(torch.float16)
        if not math.isfinite(float(scales.detach().amax())):
            raise ValueError(f"a range past {65504 * top:,} does not fit an FP16 scale")
        zeros = torch.round(-low / safe_divisor(scales, grouped.dtype)).clamp_(0, top)
        return Scaling(scales, zeros)
