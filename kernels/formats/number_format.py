"""Number format of an operand: element type, block, scale type, its name, and rounding to it.

A format describes the operands of a kernel and the result of a scheme. The kinds:

- symmetric: integers, see `symmetric_quantization`
- asymmetric: integers with a zero point, see `asymmetric`
- balanced: integers in a range symmetric about zero (ABQ-LLM's bit balance, arXiv:2408.08554,
  section 3.3)
- float: floating-point numbers of 4 to 8 bits, see `floats`
- normal: NF4 (QLoRA, arXiv:2305.14314)
- dual: DGQ, see `dual_grained`
- mixed: Atom, see `mixed`
- dense: values without scales

Scale types are described in `scales`.
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
from flexq_bench.kernels.formats.floats import FLOAT_TYPES, USUAL_TYPES, FloatType
from flexq_bench.kernels.formats.grouping import (
    check_finite,
    check_shape,
    in_groups,
    safe_divisor,
    work_dtype,
)
from flexq_bench.kernels.formats.mixed import TAIL_BITS, tail_start
from flexq_bench.kernels.formats.scales import (
    NARROW_SCALES,
    SCALE_TYPES,
    block_scales,
    matrix_scale_of,
    per_row,
)
from flexq_bench.kernels.formats.symmetric_quantization import (
    code_limits,
    nearest_codes_,
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
    "float": tuple(USUAL_TYPES),
    "normal": (4,),
    "dual": (4, 6),
    "mixed": tuple(range(2, 9)),
    "dense": (16, 32),
}
_NAME = re.compile(
    r"(?P<prefix>[a-z]+)(?P<bits>\d+)(?:-(?P<element>e\dm\d))?"
    r"(?:/(?P<block>row|tensor|\d+|(?:\d+|all)x(?:\d+|all)))?(?:@(?P<scale>\w+))?"
)
_MX_GROUP, _NVFP4_GROUP = 32, 16


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scale and zero point of each group. scales: [..., 1], of the format's scale type.

    zero_points: added to codes before scaling, [..., 1], in the dtype of the fitted values; None:
    zeros. matrix_scale: multiplies all scales.
    """

    scales: torch.Tensor
    zero_points: torch.Tensor | None = None
    matrix_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Codes of `bits` bits, one scale per block of `block_rows` rows and `group` columns.

    group: None: all K columns. block_rows: 1: each row (a channel or a token) has its own scales;
           None: all rows share them.
    kind: balanced integers lie within ±2^(bits-2): the five values of ABQ-LLM's W2* take three
          bits. Mixed ones have 8 bits in the last group of K. Dense numbers have neither codes nor
          scales.
    clip: share of a group's range that the codes span (mixed: of all groups but the last); values
          beyond it saturate.
    element: a key of FLOAT_TYPES, for floats, or "bf16"; empty: the usual one of these bits.
    scale: a key of SCALE_TYPES; empty: the usual one, FP16, or FP32 for floats in blocks of several
           rows. E4M3 scales are relative to an FP32 scale of the matrix.

    Raises ShapeError if the kind does not support the bits or the block, a block is empty, mixed
    numbers have no groups, clip is not in (0, 1] or a type is unknown.
    """

    bits: int
    group: int | None = None
    kind: Kind = "symmetric"
    clip: float = 1.0
    element: str = ""
    block_rows: int | None = 1
    scale: str = ""

    def __post_init__(self) -> None:
        if self.kind in ("symmetric", "asymmetric"):
            code_limits(self.bits)
        elif self.bits not in _BITS[self.kind]:
            known = ", ".join(str(bits) for bits in _BITS[self.kind])
            raise ShapeError(f"{self.kind} numbers have {known} bits, got {self.bits}")
        if self.group is not None and self.group < 1:
            raise ShapeError(f"a group needs at least one value, got {self.group}")
        if self.block_rows is not None and self.block_rows < 1:
            raise ShapeError(f"a block needs at least one row, got {self.block_rows}")
        if self.kind == "mixed" and self.group is None:
            raise ShapeError("mixed numbers have groups of k, the last one in 8 bits: give a group")
        if not 0 < self.clip <= 1:
            raise ShapeError(f"clip is a share of the range, above 0 and at most 1: {self.clip}")
        self._set_types()
        scale_types = ("fp16", "bf16", "fp32") if self.kind == "asymmetric" else ("fp16",)
        if self.kind not in ("symmetric", "balanced", "float") and (
            self.block_rows != 1 or self.scale not in scale_types
        ):
            raise ShapeError(
                f"{self.kind} numbers have {', '.join(scale_types)} scales of rows or groups of k"
            )

    def _set_types(self) -> None:
        """Replace empty types by the usual ones, so that equal formats compare equal."""
        if self.kind == "float":
            element = self.element or USUAL_TYPES[self.bits]
            if element not in FLOAT_TYPES or FLOAT_TYPES[element].bits != self.bits:
                raise ShapeError(
                    f"no float of {self.bits} bits is {element!r}: types are "
                    f"{', '.join(FLOAT_TYPES)}"
                )
            object.__setattr__(self, "element", element)
        elif self.element and (self.kind, self.bits, self.element) != ("dense", 16, "bf16"):
            raise ShapeError(f"only floats have an element type, not {self.kind} numbers")
        object.__setattr__(self, "scale", self.scale or self._usual_scale)
        if self.scale not in SCALE_TYPES:
            raise ShapeError(f"no scale type {self.scale!r}: types are {', '.join(SCALE_TYPES)}")

    @property
    def _usual_scale(self) -> str:
        return "fp32" if self.kind == "float" and self.block_rows != 1 else "fp16"

    @property
    def name(self) -> str:
        """Name, for example `int6/128`, `uint4/row` (asymmetric), `fp6/row` (E3M2), `fp16` (dense),
        `fp8/128x128` (rows x columns of a block), `fp8/tensor`, `fp6-e2m3/32@bf16` (with the scale
        type if it is not the usual one), `mxfp6-e3m2`, `nvfp4`.

        It does not include the clip.
        """
        plain = replace(self, clip=1.0)
        for name, known in _NAMED.items():
            if plain == known:
                return name
        number = f"{_PREFIXES[self.kind]}{self.bits}"
        if self.kind == "dense":
            return self.element or number
        if self.kind == "float" and self.element != USUAL_TYPES[self.bits]:
            number += f"-{self.element}"
        scale = "" if self.scale == self._usual_scale else f"@{self.scale}"
        return f"{number}/{self._block}{scale}"

    @property
    def _block(self) -> str:
        if self.block_rows is None and self.group is None:
            return "tensor"
        columns = "row" if self.group is None else str(self.group)
        return (
            columns if self.block_rows == 1 else f"{self.block_rows or 'all'}x{self.group or 'all'}"
        )

    @classmethod
    def parse(cls, name: str) -> NumberFormat:
        """Return the format of this name. Raises ShapeError if there is none."""
        if name in _NAMED:
            return _NAMED[name]
        parts = _NAME.fullmatch(name)
        for kind, prefix in _PREFIXES.items() if parts else ():
            if parts and parts["prefix"] == prefix and (kind == "dense") == (not parts["block"]):
                rows, group = _block_of(parts["block"])
                element, scale = parts["element"] or "", parts["scale"] or ""
                return cls(
                    int(parts["bits"]), group, kind, element=element, block_rows=rows, scale=scale
                )
        named = [known for known in _NAMED if known.startswith(name[:5])] if "fp" in name else []
        examples = ", ".join(named or ["int6/128", "uint4/row", "fp8/128x128", "mxfp4", "fp16"])
        raise ShapeError(f"no number format {name!r}: write for example {examples}")

    @property
    def float_type(self) -> FloatType:
        """The element type of a float format."""
        return FLOAT_TYPES[self.element]

    @property
    def shares_rows(self) -> bool:
        """True if a scale depends on more than one row."""
        return self.block_rows != 1 or self.scale == "e4m3"

    @property
    def dense_type(self) -> str:
        """The type of a dense format: a key of DENSE_TYPES."""
        return self.element or f"fp{self.bits}"

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

        Raises ValueError if a scale exceeds the range of its type, ShapeError for formats that are
        not fitted group by group.
        """
        if self.kind == "asymmetric":
            kind = SCALE_TYPES[self.scale]
            return Scaling(*asymmetric_scaling(grouped, self.limits[1], self.clip, kind))
        if self.kind not in ("symmetric", "balanced", "float") or self.shares_rows:
            raise ShapeError(
                f"{self.name} is not fitted group by group: see kernels.formats.quantize"
            )
        return Scaling(self._scales(grouped.abs().amax(dim=-1, keepdim=True)))

    def scaling_of(self, matrix: torch.Tensor, matrix_scale: float | None = None) -> Scaling:
        """Return the scales [rows, groups] of a finite matrix, for symmetric integers and floats.

        matrix_scale: of formats with E4M3 scales; None: computed from the matrix.
        Raises ValueError if a scale exceeds the range of its type.
        """
        blocks = in_groups(matrix.abs(), self.group, self.block_rows).amax(dim=-1).double()
        if self.scale != "e4m3":
            matrix_scale = 1.0
        elif matrix_scale is None:
            matrix_scale = matrix_scale_of(float(blocks.amax()) * self.clip, self.top)
        scales = self._scales(blocks, matrix_scale)
        rows = per_row(scales, self.block_rows, matrix.shape[0])
        return Scaling(rows, matrix_scale=matrix_scale)

    def _scales(self, largest: torch.Tensor, matrix_scale: float = 1.0) -> torch.Tensor:
        max_exponent = math.frexp(self.top)[1] - 1
        clipped = largest * self.clip
        return block_scales(clipped, self.scale, self.top, max_exponent, matrix_scale)

    @property
    def top(self) -> float:
        """The largest code's value. Raises ShapeError if codes have no scale of their own."""
        return self.float_type.largest if self.kind == "float" else self.limits[1]

    def work_dtype(self, matrix: torch.Tensor) -> torch.dtype:
        """Return the dtype in which no quotient by a scale is rounded across a tie."""
        return work_dtype(matrix) if self.scale in NARROW_SCALES else torch.float64

    def rounder(self, scaling: Scaling, dtype: torch.dtype) -> Rounder:
        """Return a rounder of values [..., length] of this dtype with a scaling."""
        zero_points = None if scaling.zero_points is None else scaling.zero_points.to(dtype)
        factor = scaling.scales.to(dtype)
        if scaling.matrix_scale != 1:
            whole = torch.tensor(scaling.matrix_scale, dtype=torch.float32, device=factor.device)
            factor = (scaling.scales.float() * whole).to(dtype)
        return Rounder(self, safe_divisor(factor, dtype), factor, zero_points)

    def round(self, matrix: torch.Tensor, matrix_scale: float | None = None) -> torch.Tensor:
        """Round [rows, K] to nearest, block by block; return code times scale in FP32.

        matrix_scale: as in `scaling_of`.
        It is exact but for FP32 scales and those relative to a matrix, whose products are rounded
        once. For symmetric integers it equals quantize_symmetric(...).dequantize().
        Raises ShapeError for an empty matrix, ValueError for NaN and infinity, and as `fit`.
        """
        check_shape(matrix, self.group)
        rows, k = matrix.shape
        if self.kind == "mixed":
            head, tail = self._parts()
            start = tail_start(k, self.group or k)
            rounded = tail.round(matrix[:, start:])
            return torch.cat([head.round(matrix[:, :start]), rounded], 1) if start else rounded
        is_plain = self.kind in ("symmetric", "balanced") and self.scale == "fp16"
        if is_plain and not self.shares_rows and fused_rounding.supports(matrix):
            fused = fused_rounding.round_symmetric(matrix, self.group, self.limits, self.clip)
            if fused is not None and math.isfinite(float(fused[1].amax())):
                return fused[0]
        grouped = in_groups(matrix.to(self.work_dtype(matrix)), self.group)
        try:
            if self.shares_rows:
                check_finite(matrix)
                shared = self.scaling_of(matrix, matrix_scale)
                scaling = replace(shared, scales=shared.scales.unsqueeze(2))
            else:
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
            return self.number.float_type.nearest(quotients).to(values.dtype)
        if self.zero_points is None:
            return nearest_codes_(quotients, self.number.limits)
        return quotients.round_().sub_(self.zero_points).clamp_(*self.number.limits)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """Return (code + zero point) · scale; with FP16 scales exact in FP32: 9 plus 11 bits."""
        shifted = codes if self.zero_points is None else codes + self.zero_points
        return shifted * self.factor


def _block_of(name: str | None) -> tuple[int | None, int | None]:
    """Rows and columns of a block from its name; None: all."""
    if name in (None, "row"):
        return 1, None
    if name == "tensor":
        return None, None
    rows, _, columns = str(name).rpartition("x")
    height, width = (None if part == "all" else int(part) for part in (rows or "1", columns))
    return height, width


def _mx(element: str) -> NumberFormat:
    bits = FLOAT_TYPES[element].bits
    return NumberFormat(bits, _MX_GROUP, "float", element=element, scale="e8m0")


# Formats with names of their own: those of OCP's specification, and NVIDIA's.
_NAMED = {
    "mxfp4": _mx("e2m1"),
    "mxfp6-e2m3": _mx("e2m3"),
    "mxfp6-e3m2": _mx("e3m2"),
    "mxfp8": _mx("e4m3"),
    "mxfp8-e5m2": _mx("e5m2"),
    "nvfp4": NumberFormat(4, _NVFP4_GROUP, "float", scale="e4m3"),
    "bf16": NumberFormat(16, kind="dense", element="bf16"),
}

FP16 = NumberFormat(16, kind="dense")
"""Dense FP16 values: an operand that is not quantized."""

DENSE_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""The types of values that are not quantized, by the names of their formats."""
