"""Inputs as named parts, tensors and operands, as they cross from a judge to a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.operand_tensors import Value, number_of
from flexq_bench.measure.inputs import LinearInputs
from flexq_bench.measure.operation_inputs import OperationCase
from flexq_bench.workloads.operation import Input

Part = torch.Tensor | Operand
Parts = Mapping[str, Part]
Plain = dict[str, dict[str, Any]]  # fields of the operands that are no tensors
WEIGHT = "w"  # of a linear layer
_REAL, _CODES = "x_real", "x"


def named_tensors(parts: Parts) -> tuple[dict[str, torch.Tensor], Plain]:
    """Tensors named `x_real`, `x.values`, `w.scales` and so on, and the operands' other fields."""
    tensors: dict[str, torch.Tensor] = {}
    plain: Plain = {}
    for name, part in parts.items():
        if isinstance(part, torch.Tensor):
            tensors[name] = part
            continue
        of_part, plain[name] = named_parts(part)
        tensors |= {f"{name}.{field}": tensor for field, tensor in of_part.items()}
    return tensors, plain


def parts_of(tensors: Mapping[str, torch.Tensor], plain: Plain) -> dict[str, Part]:
    """The inverse of `named_tensors`. Raises TypeError or ShapeError for fields of no operand."""
    fields_of: dict[str, dict[str, torch.Tensor]] = {name: {} for name in plain}
    parts: dict[str, Part] = {}
    for name, tensor in tensors.items():
        operand, _, field = name.rpartition(".")
        if operand in plain:
            fields_of[operand][field] = tensor
        else:
            parts[name] = tensor
    return parts | {name: Operand(**{**plain[name], **fields_of[name]}) for name in plain}


def named_parts(operand: Operand) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of an operand by their names, and its other fields."""
    values = {field.name: getattr(operand, field.name) for field in fields(Operand)}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in values.items() if name not in tensors}


def linear_parts(inputs: LinearInputs) -> dict[str, Part]:
    """Parts of the activations of a linear layer."""
    real = {} if inputs.x_real is None else {_REAL: inputs.x_real}
    return {**real, _CODES: inputs.x}


def linear_inputs(parts: Parts) -> LinearInputs:
    """Inputs of a linear layer, with its weights. Raises ValueError if there are none."""
    x, w, real = parts.get(_CODES), parts.get(WEIGHT), parts.get(_REAL)
    if not isinstance(x, Operand) or not isinstance(w, Operand) or isinstance(real, Operand):
        raise ValueError("no weights or no activations were given")
    return LinearInputs(real, x, w)


def value_parts(inputs: Mapping[str, Value]) -> dict[str, Part]:
    """Parts of an operation's inputs: `gamma`, or `x/0` and `x/1` of one with several operands."""
    parts: dict[str, Part] = {}
    for name, value in inputs.items():
        if value.plain is not None:
            parts[name] = value.plain
        parts |= {f"{name}/{i}": operand for i, operand in enumerate(value.operands)}
    return parts


def values_of(of: OperationCase, inputs: Sequence[Input], parts: Parts) -> dict[str, Value]:
    """The inverse of `value_parts`, for these inputs. Raises ValueError if one is missing."""
    values: dict[str, Value] = {}
    for tensor in inputs:
        number = number_of(tensor.number, of.spec)
        shape = of.definition.shape_of(tensor.name, of.values)
        plain = parts.get(tensor.name)
        operands = [
            part
            for name, part in parts.items()
            if name.rpartition("/")[0] == tensor.name and isinstance(part, Operand)
        ]
        if isinstance(plain, Operand) or isinstance(number, torch.dtype) == (plain is None):
            raise ValueError(f"{tensor.name} was not given")
        values[tensor.name] = Value(shape, number, plain, tuple(operands))
    return values
