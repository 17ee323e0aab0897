"""Definitions of FlashInfer-Bench as operations: a JSON object with axes, inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexq_bench.exchange.external.result import BadResult
from flexq_bench.exchange.flashinfer_operations import own_parameters
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.expressions import Value, evaluate
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import OperationWorkload, operation

_GEMM = "gemm"
_HEADS = {"heads": "num_qo_heads", "kv_heads": "num_kv_heads", "head_dim": "head_dim"}
_PAGED = _HEADS | {"layout": "'paged'", "block": "page_size"}
_BATCH = "(len_indptr - 1)"
_TOKENS = f"ceil(total_q / {_BATCH})"
_PROMPT = {"tokens": _TOKENS, "batch": _BATCH}
_NORM = {"tokens": "batch_size", "hidden": "hidden_size", "norm": "'rms'"}
# Beginning of a definition's name -> our operation, and its parameters as expressions of axes.
# Tokens and context are means over the sequences of a batch, the context in whole pages.
OPERATIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "gqa_paged_decode": (
        "attention_decode",
        _PAGED
        | {"batch": "batch_size", "context": "ceil(num_kv_indices * page_size / batch_size)"},
    ),
    "gqa_paged_prefill": (
        "attention_prefill",
        _PAGED
        | _PROMPT
        | {"past": f"max(0, ceil(num_kv_indices * page_size / {_BATCH}) - {_TOKENS})"},
    ),
    "gqa_ragged_prefill": (
        "attention_prefill",
        _HEADS
        | _PROMPT
        | {"layout": "'contiguous'", "past": f"max(0, ceil(total_kv / {_BATCH}) - {_TOKENS})"},
    ),
    "rmsnorm": ("norm_quantize", _NORM | {"residual": "'none'"}),
    "fused_add_rmsnorm": ("norm_quantize", _NORM | {"residual": "'add'"}),
}


@dataclass(frozen=True, slots=True)
class TraceDefinition:
    """A definition. constants: sizes of its constant axes.

    parameters: those of the operation, as expressions of axes. is_ours: the operation is one of
    this program, else it has the definition's type, and the axes as parameters.
    """

    name: str
    operation: str
    parameters: Mapping[str, str]
    constants: Mapping[str, int]
    is_ours: bool

    def workload(self, axes: Mapping[str, Any]) -> GemmWorkload | OperationWorkload:
        """Return the workload of these sizes of variable axes.

        Raises BadResult if one is missing or not positive, or if the operation can't have them.
        """
        sizes: dict[str, Value] = {}
        for axis, value in {**axes, **self.constants}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadResult(f"axis {axis} has no size")
            sizes[axis] = value
        try:
            values = {name: _value(text, sizes) for name, text in self.parameters.items()}
            if self.operation == "linear":
                return GemmWorkload(*(int(values[name]) for name in "mnk"))
            if self.is_ours:
                return operation(self.operation).workload(**values)
        except WorkloadError as error:
            raise BadResult(str(error)) from None
        return OperationWorkload(self.operation, tuple(values.items()))


def definition_of(value: Mapping[str, Any]) -> TraceDefinition:
    """Parse a definition. Raises KeyError, TypeError or AttributeError if it is none."""
    name, kind = str(value["name"]), str(value["op_type"])
    axes = value["axes"]
    constants = {axis: of["value"] for axis, of in axes.items() if of["type"] == "const"}
    if kind.startswith(_GEMM) and (product := _product(value)) is not None:
        return TraceDefinition(name, "linear", product, constants, is_ours=True)
    if (own := own_parameters(value)) is not None:
        return TraceDefinition(name, *own, constants, is_ours=True)
    for beginning, (ours, parameters) in OPERATIONS.items():
        if name.startswith(beginning):
            return TraceDefinition(name, ours, parameters, constants, is_ours=True)
    theirs = {_identifier(axis): axis for axis in axes}
    return TraceDefinition(name, _identifier(kind), theirs, constants, is_ours=False)


def _product(value: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the axes m, n and k of a single matrix product; None: it is another computation."""
    inputs = [
        tensor["shape"] for tensor in value["inputs"].values() if len(tensor["shape"] or ()) == 2
    ]
    outputs = [tensor["shape"] for tensor in value["outputs"].values()]
    if len(outputs) != 1 or len(outputs[0] or ()) != 2:
        return None
    m, n = outputs[0]
    shared = {k for rows, k in inputs if rows == m} & {k for rows, k in inputs if rows == n}
    if len(shared) != 1:  # scales have axes of their own
        return None
    return {"m": m, "n": n, "k": shared.pop()}


def _value(text: str, axes: Mapping[str, Value]) -> Value:
    """Return a word in quotation marks, or the whole number of an expression of axes."""
    if text.startswith("'"):
        return text.strip("'")
    number = evaluate(text, axes)
    if not isinstance(number, int):
        raise WorkloadError(f"{text} is {number}: no whole number")
    return number


def _identifier(text: str) -> str:
    """Return a name as operations and parameters have it."""
    name = re.sub(r"[^a-z0-9_]+", "_", text.lower())[:40]
    return name if name[:1].isalpha() else f"a{name}"
