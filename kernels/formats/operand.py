"""A quantized or dense matrix in a layout independent of kernels: codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from flexq_bench.kernels.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Operand:
    """Activations X [M,K] or weights W [N,K], quantized or dense.

    values: [rows, K]. With scales: int8 codes (uint8 for unsigned codes of 8 bits), E4M3 or E5M2
            codes, or numbers of smaller floats stored as FP16. Without: FP16 or FP32 values.
    scales: [rows, groups], FP16 or another type of `scales`; groups = ceil(K / group). Rows of a
            block have equal ones. None: dense.
    bits:   of one code; 16 for dense FP16.
    group:  values of k that share a scale; None: one scale per row (or dense). The last group of a
            row is shorter if K is not a multiple.
    zero_points: [rows, groups], int8 (int16 for codes of 8 bits), added to codes before scaling:
            minus the code of 0. None: zeros.
    row_scales:  [rows, 1], a second scale per row: FP16, or FP32 and of the whole matrix if the
            others are E4M3. None: ones.
    tail_bits:   of codes in the last group. None: bits.
    order:       int32 [K], a permutation: column j is channel order[j] of the layer's input. None:
            the identity.
    element:     of floats, a key of FLOAT_TYPES; empty: the usual one of these bits.
    block_rows:  rows of the quantized matrix that share scales; None: all.

    Raises ShapeError if scales, zero points or order don't fit values.
    """

    values: torch.Tensor
    scales: torch.Tensor | None
    bits: int
    group: int | None
    zero_points: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None
    tail_bits: int | None = None
    order: torch.Tensor | None = None
    element: str = ""
    block_rows: int | None = 1

    def __post_init__(self) -> None:
        if self.values.ndim != 2:
            raise ShapeError(f"an operand has two dimensions, got {tuple(self.values.shape)}")
        if self.scales is not None and tuple(self.scales.shape) != (self.rows, self.groups):
            raise ShapeError(
                f"scales of a {self.rows}x{self.k} operand in groups of {self.group} must be "
                f"{self.rows}x{self.groups}, got {tuple(self.scales.shape)}"
            )
        for name, tensor, columns in (
            ("zero points", self.zero_points, self.groups),
            ("row scales", self.row_scales, 1),
        ):
            if tensor is not None and tuple(tensor.shape) != (self.rows, columns):
                raise ShapeError(f"{name} must be {self.rows}x{columns}, got {tuple(tensor.shape)}")

        if self.order is not None and tuple(self.order.shape) != (self.k,):
            raise ShapeError(f"an order of {self.k} columns has {tuple(self.order.shape)}")

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def k(self) -> int:
        return self.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the values and their scales."""
        tensors = (self.values, self.scales)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    @property
    def groups(self) -> int:
        """Number of groups along K; the last one may be shorter."""
        return 1 if self.group is None else -(-self.k // self.group)

    @property
    def block_scales(self) -> torch.Tensor | None:
        """Scales [row blocks, groups], once for each block; None: dense."""
        if self.scales is None:
            return None
        return self.scales[:: self.block_rows or self.rows].contiguous()

    @property
    def group_length(self) -> int:
        """Values of k in a full group."""
        return self.k if self.group is None else self.group

    def to(self, device: torch.device | str) -> Operand:
        """Copy the operand to a device."""
        order = None if self.order is None else self.order.to(device)
        return replace(self._map_tensors(lambda tensor: tensor.to(device)), order=order)

    def slice_rows(self, start: int, stop: int) -> Operand:
        """Return rows start … stop - 1; a stop past the end means the end."""
        return self._map_tensors(lambda tensor: tensor[start:stop])

    def slice_columns(self, start: int, stop: int) -> Operand:
        """Return columns start … stop - 1, with the scales of their groups.

        Raises ShapeError if the slice cuts a group, or if the columns have another order than the
        input's channels.
        """
        if self.order is not None or self.tail_bits is not None:
            raise ShapeError("the columns are in an order of their own: they can't be split")
        ends_group = stop == self.k or not stop % self.group_length
        if self.group is not None and (start % self.group or not ends_group):
            raise ShapeError(
                f"columns {start} to {stop} of {self.k} cut a group of {self.group}: split between "
                "groups"
            )
        values, groups = self.values[:, start:stop], slice(None)
        if self.group is not None:
            groups = slice(start // self.group, -(-stop // self.group))

        def of_groups(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[:, groups].contiguous()

        return replace(
            self,
            values=values.contiguous(),
            scales=of_groups(self.scales),
            zero_points=of_groups(self.zero_points),
        )

    def with_zero_columns(self, count: int) -> Operand:
        """Append columns of zeros, of which each whole group has a scale of 1.

        Raises ShapeError if groups would be cut, or if the columns have an order of their own.
        """
        if self.order is not None or self.tail_bits is not None:
            raise ShapeError("the columns are in an order of their own: none can be appended")
        groups = 0
        if self.group is not None:
            if self.k % self.group or count % self.group:
                raise ShapeError(f"{self.k} and {count} columns cut a group of {self.group}")
            groups = count // self.group

        def appended(tensor: torch.Tensor | None, columns: int, value: int) -> torch.Tensor | None:
            if tensor is None or not columns:
                return tensor
            added = torch.full((self.rows, columns), value, dtype=torch.float32)
            added = added.to(tensor.device, tensor.dtype)
            both = [_indexable(tensor), _indexable(added)]
            return torch.cat(both, dim=1).view(tensor.dtype)

        values = appended(self.values, count, 0)
        assert values is not None
        return replace(
            self,
            values=values,
            scales=appended(self.scales, groups, 1),
            zero_points=appended(self.zero_points, groups, 0),
        )

    def take_rows(self, rows: torch.Tensor) -> Operand:
        """Return the rows of these indices, int64 [count], in their order."""

        def index(tensor: torch.Tensor) -> torch.Tensor:
            return _indexable(tensor)[rows].view(tensor.dtype)

        return self._map_tensors(index)

    def split_rows(self, counts: Sequence[int]) -> list[Operand]:
        """Split the rows into consecutive parts of these sizes; no two parts share memory."""
        ends = list(accumulate(counts))
        parts = (self.slice_rows(end - count, end) for count, end in zip(counts, ends, strict=True))
        return [part.clone() for part in parts]

    def clone(self) -> Operand:
        """Copy all tensors to new memory."""
        order = None if self.order is None else self.order.clone()
        return replace(self._map_tensors(torch.clone), order=order)

    def with_half_scales(self) -> Operand:
        """Round BF16 and FP32 scales to FP16, as kernels take them; other operands are unchanged.

        Raises ShapeError if one is beyond the range of FP16.
        """
        scales = self.scales
        if scales is None or scales.dtype not in (torch.bfloat16, torch.float32):
            return self
        halved = scales.to(torch.float16)
        if bool((halved.isinf() | (halved == 0) & (scales != 0)).any()):
            magnitudes = scales.float().abs()
            raise ShapeError(
                f"scales from {float(magnitudes.min()):.3g} to {float(magnitudes.max()):.3g} are "
                "past what a kernel's FP16 can carry: quantize the model again with other scales"
            )
        return replace(self, scales=halved)

    def dequantize(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Return the values [rows, K]: (code + zero point) times its scales.

        E4M3 scales times that of the matrix are rounded to FP32 first. Otherwise products with
        FP16 scales are exact in FP32 too.
        """
        values = self.values.to(dtype, copy=True)
        if self.zero_points is not None:
            values += self._per_value(self.zero_points, dtype)
        scales, row_scales = self.scales, self.row_scales
        if scales is not None and row_scales is not None and scales.dtype == torch.float8_e4m3fn:
            scales, row_scales = scales.float() * row_scales.float(), None
        if scales is not None:
            values *= self._per_value(scales, dtype)
        if row_scales is not None:
            values *= row_scales.to(dtype)
        return values

    def in_own_order(self) -> torch.Tensor:
        """Dequantize, with the columns in the original channel order."""
        values = self.dequantize()
        if self.order is None:
            return values
        natural = torch.empty_like(values)
        natural[:, self.order.to(values.device).long()] = values
        return natural

    @staticmethod
    def stacked(operands: Sequence[Operand]) -> Operand:
        """Concatenate the rows of operands of the same format, K and order.

        Blocks of rows remain if none is cut: if all operands but the last have whole ones.
        """

        def concatenated(name: str) -> torch.Tensor | None:
            parts = [getattr(operand, name) for operand in operands]
            if parts[0] is None:
                return None
            return torch.cat([_indexable(part) for part in parts]).view(parts[0].dtype)

        first = operands[0]
        rows = first.block_rows
        if any(rows is None or operand.rows % rows for operand in operands[:-1]):
            first = replace(first, block_rows=1)
        values = concatenated("values")
        assert values is not None  # every operand has them
        return replace(
            first,
            values=values,
            scales=concatenated("scales"),
            zero_points=concatenated("zero_points"),
            row_scales=concatenated("row_scales"),
        )

    def _per_value(self, group_values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if group_values.shape[1] == 1:
            return group_values.to(dtype)
        wide = group_values.to(dtype).repeat_interleave(self.group_length, dim=1)
        return wide[:, : self.k]

    def _map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Operand:
        """Apply a function to all tensors but the order."""

        def optional(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else function(tensor)

        return replace(
            self,
            values=function(self.values),
            scales=optional(self.scales),
            zero_points=optional(self.zero_points),
            row_scales=optional(self.row_scales),
        )


def _indexable(tensor: torch.Tensor) -> torch.Tensor:
    """View FP8 as bytes, which torch can index; return others unchanged."""
    is_fp8 = tensor.is_floating_point() and tensor.itemsize == 1
    return tensor.view(torch.uint8) if is_fp8 else tensor
