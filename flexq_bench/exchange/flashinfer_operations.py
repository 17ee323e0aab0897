"""Our operations as definitions of FlashInfer-Bench, with our references.

An axis is a parameter that is a dimension of an input by itself, or an expression that is one; it
is variable if pages draw results over it. All other parameters are tags, `layout:paged`. A tensor
of codes has its scales beside it, `x_scales`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flexq_bench.workloads.expressions import Value as Parameter
from flexq_bench.workloads.expressions import names_of
from flexq_bench.workloads.operation import (
    FORMATS,
    Input,
    Operation,
    OperationWorkload,
    Output,
    operation,
    operation_names,
)

if TYPE_CHECKING:
    import torch

    from flexq_bench.kernels.contract import KernelSpec
    from flexq_bench.kernels.formats import NumberFormat

_OURS = "source:flexq-bench"
_SCALES = "_scales"
REALS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_FLOAT_CODES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_REFERENCE = """from {module} import {function}


def run({arguments}):
    parameters = {parameters}
    return {function}({operation!r}, parameters, {formats!r}, {tensors})
"""


def types_of(number: NumberFormat) -> tuple[str, str] | None:
    """Types of a format's codes, of which each row has scales of its own, and of these; "": none.

    None: FlashInfer-Bench can't describe it.
    """
    if number.is_dense:
        return REALS[number.dense_type], ""
    codes = {"symmetric": "int8", "float": _FLOAT_CODES.get(number.element, "")}
    found = codes.get(number.kind, ""), REALS.get(number.scale, "")
    return found if all(found) and number.block_rows == 1 else None


def definition_json(workload: OperationWorkload, spec: KernelSpec) -> dict[str, Any] | None:
    """Return the definition of an operation in the formats of a kernel.

    None: one of its tensors has a format that FlashInfer-Bench can't describe. Raises WorkloadError
    for an unknown operation or parameters that don't fit it.
    """
    of = operation(workload.operation)
    values = of.checked(dict(workload.values))
    formats = {number: spec.formats[number] for number in _formats_of(workload.operation)}
    types = {name: of_number for name, n in formats.items() if (of_number := types_of(n))}
    if len(types) < len(formats):
        return None
    named = _axis_names(of)
    present = [tensor for tensor in of.inputs if 0 not in of.shape_of(tensor.name, values)]
    variable = {text for tensor in present for text in tensor.shape} & set(of.axes)
    axes: dict[str, dict[str, Any]] = {}
    sections: list[dict[str, Any]] = []
    places: dict[str, str] = {}  # of a variable parameter, where the reference finds it
    sides: tuple[Sequence[Input | Output], ...] = (of.inputs, of.outputs)
    for tensors in sides:
        section: dict[str, Any] = {}
        for tensor in tensors:
            sizes = of.shape_of(tensor.name, values)
            if 0 in sizes:
                continue
            names = [named[text] for text in tensor.shape]
            for at, (text, size) in enumerate(zip(tensor.shape, sizes, strict=True)):
                varies = not names_of(text).isdisjoint(variable)
                axes.setdefault(named[text], {"type": "var"} if varies else _constant(size))
                if text in variable:
                    places.setdefault(text, f"{tensor.name}.shape[{at}]")
            coded = formats.get(tensor.number)
            if coded is None or coded.is_dense:
                section[tensor.name] = {"shape": names, "dtype": _dtype(tensor.number, spec)}
                continue
            groups = f"{tensor.name}_groups"
            axes[groups] = _constant(-(-sizes[-1] // (coded.group or sizes[-1])))
            codes, scale = types[tensor.number]
            section[tensor.name] = {"shape": names, "dtype": codes}
            section[tensor.name + _SCALES] = {"shape": [*names[:-1], groups], "dtype": scale}
        sections.append(section)
    inputs, outputs = sections
    fixed = {name: value for name, value in values.items() if name not in places}
    parameters = [f"{n!r}: {v!r}" for n, v in fixed.items()]
    parameters += [f"{n!r}: {place}" for n, place in places.items()]
    numbers = {name: number.name for name, number in formats.items()}
    parts = [workload.operation, *numbers.values(), *(f"{n}{v}" for n, v in fixed.items())]
    return {
        "name": re.sub(r"[^a-z0-9]+", "_", "_".join(parts).replace("/", "g").lower()),
        "op_type": workload.operation,
        "tags": [_OURS, *(f"{n}:{v}" for n, v in fixed.items() if n not in axes)],
        "axes": axes,
        "inputs": inputs,
        "outputs": outputs,
        "reference": _REFERENCE.format(
            module=__name__,
            function=reference_outputs.__name__,
            arguments=", ".join(inputs),
            parameters=f"{{{', '.join(parameters)}}}",
            operation=workload.operation,
            formats=numbers,
            tensors=f"{{{', '.join(f'{name!r}: {name}' for name in inputs)}}}",
        ),
        "description": of.summary,
    }


def variable_axes(definition: Mapping[str, Any], workload: OperationWorkload) -> dict[str, int]:
    """Return the sizes of the definition's variable axes in this workload."""
    of = operation(workload.operation)
    values = of.checked(dict(workload.values))
    return {
        name: int(of.evaluate(text, values))
        for text, name in _axis_names(of).items()
        if definition["axes"].get(name, {}).get("type") == "var"
    }


def own_parameters(definition: Mapping[str, Any]) -> tuple[str, dict[str, str]] | None:
    """Return the operation of a definition that `definition_json` made, and its parameters.

    They are expressions of axes, or words in quotation marks. None: it is another's definition.
    """
    tags = [str(tag) for tag in definition.get("tags") or ()]
    name = str(definition["op_type"])
    if _OURS not in tags or name not in operation_names():
        return None
    tagged = dict(tag.split(":", 1) for tag in tags if ":" in tag)
    parameters = {
        p.name: p.name if p.name in definition["axes"] else tagged[p.name]
        for p in operation(name).parameters
        if p.name in definition["axes"] or p.name in tagged
    }
    words = {p.name for p in operation(name).parameters if p.choices}
    return name, {n: f"'{text}'" if n in words else text for n, text in parameters.items()}


def reference_outputs(
    name: str,
    parameters: Mapping[str, Parameter],
    formats: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Compute an operation's outputs by its reference, in the types that the definition declares.

    formats: by names of FORMATS. tensors: of the definition's inputs. Elements of which any value
    is right are 0.
    """
    import torch

    from flexq_bench.kernels.contract import KernelSpec
    from flexq_bench.kernels.formats import FP16, NumberFormat, Operand
    from flexq_bench.kernels.formats.scales import SCALE_TYPES
    from flexq_bench.kernels.operand_tensors import Value, number_of
    from flexq_bench.measure.operation_inputs import OperationCase

    numbers = {number: NumberFormat.parse(text) for number, text in formats.items()}
    spec = KernelSpec(
        name="reference",
        backend="cpu",
        weight=numbers.get("weight", FP16),
        activation=numbers.get("activation", FP16),
        summary="",
        output=numbers.get("dtype", FP16).dense_type,
        operation=name,
        cache=numbers.get("cache", FP16),
    )
    of = OperationCase(operation(name).workload(**parameters), spec)
    values: dict[str, Value] = {}
    for tensor in of.definition.inputs:
        shape = of.definition.shape_of(tensor.name, of.values)
        number = number_of(tensor.number, spec)
        given = tensors.get(tensor.name)
        if given is None:
            given = torch.zeros(shape)
        if isinstance(number, NumberFormat):
            scales = tensors[tensor.name + _SCALES]
            rows = math.prod(shape[:-1])
            codes = given.reshape(rows, shape[-1])
            operand = Operand(
                *(codes, scales.reshape(rows, -1), number.bits, number.group),
                element=number.element,
            )
            values[tensor.name] = Value(shape, number, None, (operand,))
        else:
            values[tensor.name] = Value(shape, number, given.reshape(shape).to(number))
    expected = of.expected(values)
    results: list[torch.Tensor] = []
    for result in of.definition.outputs:
        number = number_of(result.number, spec)
        if 0 in of.definition.shape_of(result.name, of.values):
            continue
        if isinstance(number, torch.dtype):
            y = expected[f"{result.name}.values"].y.nan_to_num()
            results.append(y.to(number))
            continue
        codes = expected[f"{result.name}.codes"].y.nan_to_num()
        scales = expected[f"{result.name}.scales"].y.nan_to_num().to(SCALE_TYPES[number.scale])
        is_float = number.kind == "float"
        codes = codes.to(number.float_type.dtype) if is_float else codes.round().to(torch.int8)
        results += [codes, scales.reshape(*codes.shape[:-1], -1)]
    return results[0] if len(results) == 1 else tuple(results)


def _formats_of(name: str) -> Sequence[str]:
    """The names of FORMATS that tensors of an operation have."""
    of = operation(name)
    used = {tensor.number for tensor in _tensors_of(of)}
    return [number for number in FORMATS if number in used]


def _tensors_of(of: Operation) -> Sequence[Input | Output]:
    return (*of.inputs, *of.outputs)


def _constant(size: int) -> dict[str, Any]:
    return {"type": "const", "value": size}


def _axis_names(of: Operation) -> dict[str, str]:
    """Names of dimensions by their expressions: of a parameter, or of the expression's place."""
    names: dict[str, str] = {}
    for tensor in _tensors_of(of):
        for at, text in enumerate(tensor.shape):
            is_parameter = re.fullmatch(r"[a-z_][a-z0-9_]*", text)
            names.setdefault(text, text if is_parameter else f"{tensor.name}_{at}")
    return names


def _dtype(number: str, spec: KernelSpec) -> str:
    """The name of a type of whole numbers or reals."""
    from flexq_bench.kernels.operand_tensors import number_of

    return str(number_of(number, spec)).removeprefix("torch.")
