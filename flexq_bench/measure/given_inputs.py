"""Inputs of a linear layer as named tensors, as they cross from a judge to a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from flexq_bench.kernels.formats import Operand
from flexq_bench.measure.inputs import LinearInputs

Plain = dict[str, dict[str, Any]]  # fields of the operands that are no tensors
_OPERANDS = ("x", "w")
_REAL = "x_real"


def named_tensors(
    inputs: LinearInputs, *, weights: bool = True
) -> tuple[dict[str, torch.Tensor], Plain]:
    """Tensors named `x_real`, `x.values`, `w.scales` and so on, and the operands' other fields.

    weights: False leaves out W.
    """
    tensors = {} if inputs.x_real is None else {_REAL: inputs.x_real}
    plain: Plain = {}
    for operand in _OPERANDS if weights else _OPERANDS[:1]:
        parts, plain[operand] = named_parts(getattr(inputs, operand))
        tensors |= {f"{operand}.{name}": tensor for name, tensor in parts.items()}
    return tensors, plain


def named_parts(operand: Operand) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of an operand by their names, and its other fields."""
    values = {field.name: getattr(operand, field.name) for field in fields(Operand)}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in values.items() if name not in tensors}


def linear_inputs(
    tensors: Mapping[str, torch.Tensor], plain: Plain, w: Operand | None = None
) -> LinearInputs:
    """The inverse of `named_tensors`. w: the weights, if they are not among the tensors."""
    operands = {}
    for operand, values in plain.items():
        named = {name.partition(".")[::2]: tensor for name, tensor in tensors.items()}
        parts = {field: tensor for (of, field), tensor in named.items() if of == operand}
        operands[operand] = Operand(**{**values, **parts})
    found = operands.get("w", w)
    if found is None:
        raise ValueError("no weights were given")
    return LinearInputs(tensors.get(_REAL), operands["x"], found)
