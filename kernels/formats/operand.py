"""A matrix as a kernel's reference sees it: codes and scales, in no kernel's layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from kernels.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Operand:
    """Activations X [M,K] or weights W [N,K], quantized or dense.

    values: [rows, K], int8 (uint8 where unsigned ones have 8 bits) or E4M3 codes, or FP16 values
            that E3M2 or E3M1 has, where scales is given; else FP16/FP32 values.
    scales: [rows, groups], FP16; groups = ceil(K / group). None: dense.
    bits:   of one code; 16 for dense FP16.
    group:  values of k that share a scale; None: one scale a row (or dense). The last group of a
            row is shorter where K is not a multiple.
    zero_points: [rows, groups], int8 (int16 for codes of 8 bits), added to codes before they are
            scaled: minus the code that stands for 0. None: zeros.
    row_scales:  [rows, 1], FP16, a second scale that a whole row shares. None: ones.
    tail_bits:   of codes in the last group. None: bits, as everywhere.
    order:       int32 [K], a permutation: column j is channel order[j] of the layer's input. None:
            the channels' own order.

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

    def __post_init__(self) -> None:
        if self.values.ndim != 2:
            raise ShapeError(f"an operand has two dimensions, got {tuple(self.values.shape)}")
        if self.scales is not None and tuple(self.scales.shape) != (self.rows, self.groups):
            raise ShapeError(
                f"scales of a {self.rows}x{self.k} operand in groups of {self.group} must be "
                f"{self.rows}x{self.groups}, got {tuple(self.scales.shape)}"
            )
        for name, of_groups, columns in (
            ("zero points", self.zero_points, self.groups),
            ("row scales", self.row_scales, 1),
        ):
            if of_groups is not None and tuple(of_groups.shape) != (self.rows, columns):
                raise ShapeError(
                    f"{name} must be {self.rows}x{columns}, got {tuple(of_groups.shape)}"
                )

        if self.order is not None and tuple(self.order.shape) != (self.k,):
            raise ShapeError(f"an order of {self.k} columns has {tuple(self.order.shape)}")

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def k(self) -> int:
        return self.values.shape[1]

    @property
    def groups(self) -> int:
        """Groups along K, the last one possibly shorter."""
        return 1 if self.group is None else -(-self.k // self.group)

    @property
    def group_length(self) -> int:
        """Values of k in a full group."""
        return self.k if self.group is None else self.group

    def to(self, device: torch.device | str) -> Operand:
        """The same operand on another device."""
        order = None if self.order is None else self.order.to(device)
        return replace(self._mapped(lambda tensor: tensor.to(device)), order=order)

    def slice_rows(self, start: int, stop: int) -> Operand:
        """Rows start … stop - 1, or to the end."""
        return self._mapped(lambda tensor: tensor[start:stop])

    def take_rows(self, rows: torch.Tensor) -> Operand:
        """The rows of these indices, int64 [count], in their order."""

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            return _indexable(tensor)[rows].view(tensor.dtype)

        return self._mapped(taken)

    def split_rows(self, counts: Sequence[int]) -> list[Operand]:
        """Split the rows into consecutive parts of these sizes; no two parts share memory."""
        ends = list(accumulate(counts))
        parts = (self.slice_rows(end - count, end) for count, end in zip(counts, ends, strict=True))
        return [
            replace(
                part._mapped(torch.clone), order=None if self.order is None else self.order.clone()
            )
            for part in parts
        ]

    def dequantize(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The real values [rows, K]: (code + zero point) times its scales, exact in FP32 too."""
        values = self.values.to(dtype, copy=True)
        if self.zero_points is not None:
            values += self._per_value(self.zero_points, dtype)
        if self.scales is not None:
            values *= self._per_value(self.scales, dtype)
        if self.row_scales is not None:
            values *= self.row_scales.to(dtype)
        return values

    def in_own_order(self) -> torch.Tensor:
        """`dequantize`, each column where its channel is."""
        values = self.dequantize()
        if self.order is None:
            return values
        own = torch.empty_like(values)
        own[:, self.order.to(values.device).long()] = values
        return own

    @staticmethod
    def stacked(operands: Sequence[Operand]) -> Operand:
        """All rows of operands of one format, k and order, below each other."""

        def joined(name: str) -> torch.Tensor | None:
            parts = [getattr(operand, name) for operand in operands]
            if parts[0] is None:
                return None
            return torch.cat([_indexable(part) for part in parts]).view(parts[0].dtype)

        first = operands[0]
        values = joined("values")
        assert values is not None  # every operand has them
        return replace(
            first,
            values=values,
            scales=joined("scales"),
            zero_points=joined("zero_points"),
            row_scales=joined("row_scales"),
        )

    def _per_value(self, of_groups: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if of_groups.shape[1] == 1:
            return of_groups.to(dtype)
        wide = of_groups.to(dtype).repeat_interleave(self.group_length, dim=1)
        return wide[:, : self.k]

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Operand:
        def changed(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else change(tensor)

        return replace(
            self,
            values=change(self.values),
            scales=changed(self.scales),
            zero_points=changed(self.zero_points),
            row_scales=changed(self.row_scales),
        )


def _indexable(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers where torch has no indexing of the type: E4M3."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
