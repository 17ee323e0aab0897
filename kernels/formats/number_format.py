"""Number format of an operand: bits, group and kind, its name, and rounding to it.

A format describes the operands of a kernel and the result of a scheme. The kinds:

- symmetric: integers, see `symmetric_quantization`
- asymmetric: integers with a zero point, see `asymmetric`
- balanced: integers in a range symmetric about zero (ABQ-LLM's bit balance, arXiv:2408.08554,
  section 3.3)
- float: E3M2 of 6 bits and E3M1 of 5 (ZeroQuant(4+2), arXiv:2312.08583, section 4), E4M3 of 8
- normal: NF4 (QLoRA, arXiv:2305.14314)
- dual: DGQ, see `dual_grained`
- mixed: Atom, see `mixed`
- dense: values without scales
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

import torch

from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import fused_rounding
from flexq_bench.kernels.formats.asymmetric import asymmetric_scaling
from flexq_bench.kernels.formats.dual_grained import CODE_BITS
from flexq_bench.kernels.formats.grouping import (
    check_finite,
    check_shape,
    in_groups,
    safe_divisor,
    work_dtype,
)
from flexq_bench.kernels.formats.minifloat import LARGEST, nearest_minifloat
from flexq_bench.kernels.formats.mixed import TAIL_BITS, tail_start
from flexq_bench.kernels.formats.symmetric_quantization import (
    code_limits,
    nearest_codes_,
    scales_to,
)

Kind = Literal["symmetric", "asymmetric", "balanced", "float", "normal", "dual", "mixed", "dense"]
# The prefix of a name; dense and float formats differ by whether a group follows the bits.
_PREFIXES: dict[Kind, str] = {
    "symmetric": "int",
    "asymmetric": "uint",
    "balanced": "balanced",
    "float": "fp",
    "normal": "nf",
    "dual": "dual",
    "mixed": "mixed",
    "dense": "fp",
}
_BITS: dict[Kind, tuple[int, ...]] = {
    "balanced": tuple(range(3, 10)),
    "float": (5, 6, 8),
    "normal": (4,),
    "dual": (4, 6),
    "mixed": tuple(range(2, 9)),
    "dense": (16, 32),
}
_NAME = re.compile(r"(?P<prefix>[a-z]+)(?P<bits>\d+)(?:/(?P<group>row|\d+))?")


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scale and zero point of each group. scales: FP16 [..., 1].

    zero_points: added to codes before scaling, [..., 1], in the dtype of the fitted values; None:
    zeros.
    """

    scales: torch.Tensor
    zero_points: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Codes of `bits` bits, one FP16 scale per `group` of k (None: per row: a channel or a token).

    kind: balanced integers lie within ±2^(bits-2): the five values of ABQ-LLM's W2* take three
          bits. Mixed ones have 8 bits in the last group of K. Dense numbers have neither codes nor
          scales.
    clip: share of a group's range that the codes span (mixed: of all groups but the last); values
          beyond it saturate.

    Raises ShapeError if the kind does not support the bits, a group is empty, mixed numbers have no
    groups or clip is not in (0, 1].
    """

    bits: int
    group: int | None = None
    kind: Kind = "symmetric"
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.kind in ("symmetric", "asymmetric"):
            code_limits(self.bits)
        elif self.bits not in _BITS[self.kind]:
            known = ", ".join(str(bits) for bits in _BITS[self.kind])
            raise ShapeError(f"{self.kind} numbers have {known} bits, got {self.bits}")
        if self.group is not None and self.group < 1:
            raise ShapeError(f"a group needs at least one value, got {self.group}")
        if self.kind == "mixed" and self.group is None:
            raise ShapeError("mixed numbers have groups of k, the last one in 8 bits: give a group")
        if not 0 < self.clip <= 1:
            raise ShapeError(f"clip is a share of the range, above 0 and at most 1: {self.clip}")

    @property
    def name(self) -> str:
        """Name, for example `int6/128`, `uint4/row` (asymmetric), `fp6/row` (E3M2), `fp16` (dense).

        It does not include the clip.
        """
        number = f"{_PREFIXES[self.kind]}{self.bits}"
        if self.kind == "dense":
            return number
        return f"{number}/{'row' if self.group is None else self.group}"

    @classmethod
    def parse(cls, name: str) -> NumberFormat:
        """Return the format of this name. Raises ShapeError if there is none."""
        parts = _NAME.fullmatch(name)
        for kind, prefix in _PREFIXES.items() if parts else ():
            if parts and parts["prefix"] == prefix and (kind == "dense") == (not parts["group"]):
                group = parts["group"]
                return cls(
                    int(parts["bits"]), int(group) if group and group != "row" else None, kind
                )
        raise ShapeError(f"no number format {name!r}: write int6/128, uint4/row, fp6/row or fp16")

    @property
    def is_dense(self) -> bool:
        """True if values are not quantized."""
        return self.kind == "dense"

    @property
    def is_integer(self) -> bool:
        """True if codes are integers."""
        return self.kind not in ("dense", "float", "normal")

    @property
    def has_zero_points(self) -> bool:
        """True if codes are unsigned, with a zero point per group."""
        return self.kind == "asymmetric" or (self.kind == "dual" and self.bits == CODE_BITS)

    @property
    def limits(self) -> tuple[int, int]:
        """Lowest and highest integer code; for mixed formats those of 4 bits.

        Raises ShapeError if codes are not integers.
        """
        if not self.is_integer:
            raise ShapeError(f"{self.name} has no integer codes")
        if self.kind == "balanced":
            top: int = 2 ** (self.bits - 2)
            return -top, top
        low, high = code_limits(self.bits)
        if self.has_zero_points:
            return 0, high - low
        return (-high, high) if self.kind == "dual" else (low, high)

    def columns(self, k: int) -> tuple[ColumnGroup, ...]:
        """Return the groups of K columns; the last one may be shorter."""
        length, last = self.group or k, tail_start(k, self.group or k)
        head, tail = self._parts() if self.kind == "mixed" else (self, self)
        return tuple(
            ColumnGroup(start, min(start + length, k), tail if start == last else head)
            for start in range(0, k, length)
        )

    def fit(self, grouped: torch.Tensor) -> Scaling:
        """Return the scaling of groups [..., length].

        Raises ValueError if a scale exceeds the range of FP16, ShapeError for kinds that are not
        fitted group by group.
        """
        if self.kind == "asymmetric":
            return Scaling(*asymmetric_scaling(grouped, self.limits[1], self.clip))
        if self.kind == "float" and self.bits in LARGEST:
            return Scaling(scales_to(grouped, LARGEST[self.bits], self.clip))
        if self.kind in ("symmetric", "balanced"):
            return Scaling(scales_to(grouped, self.limits[1], self.clip))
        raise ShapeError(f"{self.name} is not fitted group by group: see kernels.formats.quantize")

    def rounder(self, scaling: Scaling, dtype: torch.dtype) -> Rounder:
        """Return a rounder of values [..., length] of this dtype with a scaling."""
        zero_points = None if scaling.zero_points is None else scaling.zero_points.to(dtype)
        divisor, factor = safe_divisor(scaling.scales, dtype), scaling.scales.to(dtype)
        return Rounder(self, divisor, factor, zero_points)

    def round(self, matrix: torch.Tensor) -> torch.Tensor:
        """Round [rows, K] to nearest, group by group; return code times scale, exact in FP32.

        For symmetric integers it equals quantize_symmetric(...).dequantize().
        Raises ShapeError for an empty matrix, ValueError for NaN and infinity, and as `fit`.
        """
        check_shape(matrix, self.group)
        rows, k = matrix.shape
        if self.kind == "mixed":
            head, tail = self._parts()
            start = tail_start(k, self.group or k)
            rounded = tail.round(matrix[:, start:])
            return torch.cat([head.round(matrix[:, :start]), rounded], 1) if start else rounded
        if self.kind in ("symmetric", "balanced") and fused_rounding.supports(matrix):
            fused = fused_rounding.round_symmetric(matrix, self.group, self.limits, self.clip)
            if fused is not None and math.isfinite(float(fused[1].amax())):
                return fused[0]
        grouped = in_groups(matrix.to(work_dtype(matrix)), self.group)
        try:
            scaling = self.fit(grouped)
        except ValueError:
            check_finite(matrix)  # NaN and infinity get a message of their own
            raise
        rounder = self.rounder(scaling, grouped.dtype)
        rounded = rounder.values(rounder.codes(grouped))
        return rounded.view(rows, -1)[:, :k].to(torch.float32).contiguous()

    def _parts(self) -> tuple[NumberFormat, NumberFormat]:
        """Return the formats of a mixed format's groups: of all but the last, and of the last."""
        return replace(self, kind="symmetric"), NumberFormat(TAIL_BITS, self.group)


@dataclass(frozen=True, slots=True)
class ColumnGroup:
    """Columns start … end - 1 of a matrix, with one scale per row. format: of their codes."""

    start: int
    end: int
    format: NumberFormat


@dataclass(frozen=True, slots=True)
class Rounder:
    """Quantization and dequantization of groups [..., length] with a given scaling.

    divisor, factor: the scale to divide and to multiply by, [..., 1]. All in the values' dtype.
    """

    number: NumberFormat
    divisor: torch.Tensor
    factor: torch.Tensor
    zero_points: torch.Tensor | None

    def codes(self, values: torch.Tensor) -> torch.Tensor:
        """Return the nearest codes (floats: the nearest numbers), in the values' dtype."""
        quotients = values / self.divisor
        if self.number.kind == "float":
            return nearest_minifloat(quotients, self.number.bits).to(values.dtype)
        if self.zero_points is None:
            return nearest_codes_(quotients, self.number.limits)
        return quotients.round_().sub_(self.zero_points).clamp_(*self.number.limits)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """Return (code + zero point) · scale, exact in FP32: 9 plus 11 significant bits."""
        shifted = codes if self.zero_points is None else codes + self.zero_points
        return shifted * self.factor


FP16 = NumberFormat(16, kind="dense")
"""Dense FP16 values: an operand that is not quantized."""
