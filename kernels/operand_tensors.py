"""Tensors of inputs and outputs in any number format, as functions get and return them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flexq_bench.kernels.contract import KernelSpec, checked_scales
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import DENSE_TYPES, NumberFormat, Operand, quantize

_DTYPES = DENSE_TYPES | {
    "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn,
    **{name: getattr(torch, name) for name in ("int8", "int32", "int64", "bool", "uint8")},
}
_MATRIX_DIMENSIONS = 3  # of a stack of matrices, each with scales of its own


def number_of(name: str, spec: KernelSpec) -> torch.dtype | NumberFormat:
    """The type of a tensor's elements: of a definition's `number`, for a kernel of this spec.

    Raises ShapeError for an unknown one.
    """
    if name in _DTYPES:
        dtype: torch.dtype = _DTYPES[name]
        return dtype
    number = spec.formats.get(name) or NumberFormat.parse(name)
    return DENSE_TYPES[number.dense_type] if number.is_dense else number


@dataclass(frozen=True, eq=False)
class Value:
    """An input of an operation: tensors of one type, or operands with codes and scales.

    operands: of the matrices [rows, last dimension] of the shape; empty: `plain` has the values.
    """

    shape: tuple[int, ...]
    number: torch.dtype | NumberFormat
    plain: torch.Tensor | None = None
    operands: tuple[Operand, ...] = ()

    @staticmethod
    def of(real: torch.Tensor, number: torch.dtype | NumberFormat) -> Value:
        """Convert or quantize values. Raises as kernels.formats.quantize."""
        shape = tuple(real.shape)
        if isinstance(number, torch.dtype):
            return Value(shape, number, real.to(number))
        return Value(
            shape, number, None, tuple(quantize(m, number) for m in _matrices(real, number))
        )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that a kernel gets, in order: `values`, or codes, scales and others."""
        if self.plain is not None:
            return {"values": self.plain}
        assert isinstance(self.number, NumberFormat)
        parts = [operand_tensors(operand, self.number) for operand in self.operands]
        lead = self.shape[:-1]
        tensors: dict[str, torch.Tensor] = {}
        for name in parts[0]:
            stacked = _stacked([part[name] for part in parts])
            of_rows = stacked.shape[0] == math.prod(lead) if len(parts) == 1 else False
            if name == "codes":
                stacked = stacked.reshape(self.shape)
            elif of_rows and stacked.ndim == 2:
                stacked = stacked.reshape(*lead, stacked.shape[-1])
            tensors[name] = stacked
        return tensors

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def real(self) -> torch.Tensor:
        """The exact values: float64, or the integers."""
        if self.plain is not None:
            return self.plain.double() if self.plain.is_floating_point() else self.plain
        return torch.cat([operand.dequantize() for operand in self.operands]).reshape(self.shape)


def operand_tensors(operand: Operand, number: NumberFormat) -> dict[str, torch.Tensor]:
    """The tensors of a matrix that a function gets, in order.

    Raises ShapeError if the operand has another format.
    """
    if operand.scales is None:
        return {"values": operand.values}
    checked_scales(operand, number)
    assert operand.block_scales is not None  # as checked
    tensors = {"codes": operand.values, "scales": operand.block_scales}
    if operand.row_scales is not None and number.kind == "dual":
        tensors["row_scales"] = operand.row_scales
    elif operand.row_scales is not None:
        tensors["matrix_scale"] = operand.row_scales[0].contiguous()
    if operand.zero_points is not None:
        tensors["zero_points"] = operand.zero_points
    if operand.order is not None:
        tensors["order"] = operand.order
    return tensors


def parts_of(number: torch.dtype | NumberFormat) -> tuple[str, ...]:
    """Names of the tensors of a number, in order."""
    if isinstance(number, torch.dtype) or number.is_dense or number.kind == "normal":
        return ("values",)
    special = {"dual": ("row_scales",), "mixed": ("order",)}.get(number.kind, ())
    if number.scale == "e4m3":
        special = ("matrix_scale",)
    return ("codes", "scales", *special, *(("zero_points",) if number.has_zero_points else ()))


def buffers_of(values: Mapping[str, Value]) -> dict[str, torch.Tensor]:
    """The tensors of inputs, named `<input>.<part>`."""
    return {
        f"{name}.{part}": tensor
        for name, value in values.items()
        for part, tensor in value.tensors.items()
    }


def _matrices(real: torch.Tensor, number: NumberFormat) -> Sequence[torch.Tensor]:
    """The matrices that have scales of their own, [rows, last dimension]."""
    if real.ndim < 1:
        raise ShapeError("a quantized tensor has at least one dimension")
    if real.ndim == _MATRIX_DIMENSIONS and number.shares_rows:
        return list(real)
    return [real.reshape(-1, real.shape[-1])]


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    if parts[0].itemsize == 1 and parts[0].is_floating_point():
        return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
    return torch.stack(list(parts))
