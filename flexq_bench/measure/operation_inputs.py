"""Inputs of an operation from a seed, and the outputs that its definition expects of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from flexq_bench.errors import FlexqError, MeasureError, one_line
from flexq_bench.kernels.contract import KernelSpec
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.operand_tensors import Value, number_of, parts_of
from flexq_bench.kernels.reference import BF16_BITS, FP16_BITS, Reference
from flexq_bench.measure.check import CANCELLATION
from flexq_bench.measure.inputs import OUTLIER_CHANNELS, OUTLIER_FACTOR, WEIGHT_STD
from flexq_bench.workloads.operation import (
    BELOW,
    Input,
    Operation,
    OperationWorkload,
    operation,
)

OPERATION_DISTRIBUTION = "operation-v1"
# Codes are right within half of one. Of the values that are rounded to them, an intermediate
# result, the value, a factor, the scale and the largest value, which it comes from, may be rounded
# to the kernel's type before: by eight times half of its last bit in all.
_CODE_SLACK, _CODE_BITS = 0.5, 2
# Intermediate results (a sum with the residual, rotated queries) may have been rounded to the
# kernel's type, as models in FP16 do.
_ROUNDED_BITS = 1
_EXACT_BITS = 60  # no rounding is allowed
_FP8_BITS = 4
_FP8_SUMS = 0.25  # share of the magnitude, for sums of 16 bits: see kernels/reference.py
_AS_GIVEN = 14  # bits of sums for which a magnitude is the scale of the tolerance


class OperationCase:
    """An operation at one set of parameters, in the formats of a kernel.

    Raises WorkloadError for an unknown operation or parameters that don't fit it.
    """

    def __init__(self, workload: OperationWorkload, spec: KernelSpec) -> None:
        self.definition: Operation = operation(workload.operation)
        self.values = self.definition.checked(dict(workload.values))
        self.workload = self.definition.workload(**self.values)
        self.spec = spec

    @property
    def floor_bytes(self) -> int | None:
        """Bytes that any implementation must move; None: the definition doesn't say."""
        if not self.definition.bytes:
            return None
        expression = self.definition.bytes
        return int(self.definition.evaluate(expression, self.values, self.spec.formats))

    def streamed(self, cache: str) -> tuple[Input, ...]:
        """The inputs that launches read from memory: weights, states and what they update.

        Without these, all that are cold.

        cache: the case's mode. None are if there are no weights and states and it is hot.
        """
        inputs, updated = self.definition.inputs, {of for _, of in self.spec.updates}
        streamed = tuple(i for i in inputs if i.role in ("weight", "state") or i.name in updated)
        if streamed or cache == "hot":
            return streamed
        return tuple(i for i in inputs if i.role == "activation")

    @property
    def updated_bytes(self) -> int:
        """Bytes of the inputs that launches write into, without scales."""
        updated = {of for _, of in self.spec.updates}
        return self.bytes_of([i for i in self.definition.inputs if i.name in updated])

    def bytes_of(self, tensors: Sequence[Input]) -> int:
        """Bytes of these inputs in as many bits as they have, without scales."""
        total = 0
        for tensor in tensors:
            number = number_of(tensor.number, self.spec)
            bits = 8 * number.itemsize if isinstance(number, torch.dtype) else number.bits
            shape = self.definition.shape_of(tensor.name, self.values)
            total += math.prod(shape) * bits // 8
        return total

    def draw(self, inputs: tuple[Input, ...], generator: torch.Generator) -> dict[str, Value]:
        """Draw these inputs, on the generator's device."""
        special = self.definition.draw
        drawn = {} if special is None else special(self.values, generator)
        return {
            i.name: Value.of(
                drawn[i.name] if i.name in drawn else self._real(i, generator),
                number_of(i.number, self.spec),
            )
            for i in inputs
        }

    def _real(self, tensor: Input, generator: torch.Generator) -> torch.Tensor:
        shape = self.definition.shape_of(tensor.name, self.values)
        kind, device = tensor.distribution, generator.device
        if kind.startswith(BELOW):
            top = int(self.definition.evaluate(kind.removeprefix(BELOW), self.values))
            return torch.randint(top, shape, generator=generator, device=device)
        if kind == "ones":
            return torch.ones(shape, device=device)
        if kind == "uniform":
            return torch.rand(shape, generator=generator, device=device, dtype=torch.float32)
        real = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        if kind == "weight":
            real.mul_(WEIGHT_STD)
        elif kind == "outliers" and real.ndim:
            features = shape[-1]
            count = max(1, round(features * OUTLIER_CHANNELS))
            channels = torch.randperm(features, generator=generator, device=device)[:count]
            real[..., channels] *= OUTLIER_FACTOR
        return real

    @property
    def values_in_all(self) -> int:
        """Number of values of all inputs and outputs."""
        names = [tensor.name for tensor in self.definition.inputs]
        names += [tensor.name for tensor in self.definition.outputs]
        return sum(math.prod(self.definition.shape_of(name, self.values)) for name in names)

    def outputs(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Uninitialized outputs, named `<output>.<part>`."""
        made: dict[str, torch.Tensor] = {}
        for output in self.definition.outputs:
            shape = self.definition.shape_of(output.name, self.values)
            number = number_of(output.number, self.spec)
            if isinstance(number, torch.dtype):
                made[f"{output.name}.values"] = torch.empty(shape, dtype=number, device=device)
                continue
            parts = Value.of(torch.zeros(shape, device=device), number).tensors
            made |= {f"{output.name}.{part}": tensor for part, tensor in parts.items()}
        return made

    def expected(self, inputs: Mapping[str, Value]) -> dict[str, Reference]:
        """Compute the right outputs, by `<output>.<part>`.

        Raises MeasureError if the definition has no reference, or it returns other outputs, or
        nothing to compare with.
        """
        reference = self.definition.reference
        if reference is None:
            raise MeasureError(f"{self.definition.name} has no reference: give it one")
        made = self._called(reference, inputs)
        outputs = self.definition.outputs
        if not isinstance(made, Mapping):
            made = {outputs[0].name: made}
        if set(made) != {output.name for output in outputs}:
            raise MeasureError(
                f"the reference of {self.definition.name} returns {', '.join(map(str, made))}: "
                f"its outputs are {', '.join(output.name for output in outputs)}"
            )
        expected: dict[str, Reference] = {}
        for output in outputs:
            y = made[output.name]
            y, *terms = y if isinstance(y, tuple) else (y,)
            if not isinstance(y, torch.Tensor):
                raise MeasureError(
                    f"the reference of {self.definition.name} returns a {type(y).__name__} for "
                    f"{output.name}: return a tensor"
                )
            shape = self.definition.shape_of(output.name, self.values)
            if tuple(y.shape) != shape:
                raise MeasureError(
                    f"the reference of {self.definition.name} returns {output.name} of shape "
                    f"{list(y.shape)}: it is declared as {list(shape)}"
                )
            if y.numel() and bool(y.isnan().all()):
                raise MeasureError(
                    f"the reference of {self.definition.name} returns only NaN for {output.name}: "
                    "any result would be right"
                )
            number = number_of(output.number, self.spec)
            for part, known in self._references(number, y, *terms).items():
                expected[f"{output.name}.{part}"] = known
        return expected

    def accepted(
        self, inputs: Mapping[str, Value], outputs: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """By the definition's own rule, which elements are right, by `<output>.<part>`."""
        accepts = self.definition.accepts
        if accepts is None:
            return {}
        plain = {name.removesuffix(".values"): tensor for name, tensor in outputs.items()}
        right = self._called(accepts, inputs, plain)
        return {f"{name}.values": tensor for name, tensor in right.items()}

    def _called(
        self,
        function: Callable[..., Any],
        inputs: Mapping[str, Value],
        others: Mapping[str, torch.Tensor] | None = None,
    ) -> Any:
        """Call a function of the definition with what it takes by name."""
        names = _names(function)
        taken = {n: v.real() for n, v in inputs.items() if n in names}
        known = {**self.spec.formats, **self.values, **taken, **(others or {})}
        try:
            return function(**{name: known[name] for name in names if name in known})
        except (FlexqError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # else it would look like the kernel's
            raise MeasureError(
                f"a function of {self.definition.name} raises {type(error).__name__}: "
                f"{one_line(error)}"
            ) from error

    def _references(
        self, number: torch.dtype | NumberFormat, y: torch.Tensor, *terms: torch.Tensor
    ) -> dict[str, Reference]:
        if isinstance(number, torch.dtype):
            return {"values": self._plain_reference(number, y.double(), *terms)}
        unwritten = y.isnan()
        operand = Value.of(torch.where(unwritten, 0.0, y).float(), number)
        tensors = operand.tensors
        references = {}
        for part in parts_of(number):
            if part == "codes":
                references[part] = self._codes_reference(operand, number, y)
            else:
                values = tensors[part].double()
                if part == "scales" and values.shape[:-1] == y.shape[:-1]:
                    values = values.masked_fill(unwritten.all(dim=-1, keepdim=True), torch.nan)
                references[part] = self._plain_reference(torch.float32, values)
        return references

    def _plain_reference(
        self,
        dtype: torch.dtype,
        y: torch.Tensor,
        magnitude: torch.Tensor | None = None,
        changes: torch.Tensor | float = 0.0,
    ) -> Reference:
        """Numbers are judged relative to themselves and to the others of their row.

        A sum of many terms of which each was rounded has the error of their root sum of squares,
        as the row's values are, not that of the sum of their magnitudes.
        """
        if not dtype.is_floating_point:
            zeros = torch.zeros_like(y)
            return Reference(y, zeros, output_bits=_EXACT_BITS, largest=math.inf, slack=0.25)
        bits = _FP8_BITS if dtype.itemsize == 1 else self.bits - _ROUNDED_BITS
        scale = y.abs() if y.ndim == 0 else y.square().nanmean(-1, keepdim=True).sqrt().expand_as(y)
        scale = (scale + changes) * 2.0 ** (FP16_BITS - bits)
        if magnitude is not None:
            of_inputs = (self.spec.weight, self.spec.activation)
            is_fp8 = all(number.kind == "float" and number.bits == 8 for number in of_inputs)
            sums = _FP8_SUMS if is_fp8 else CANCELLATION
            scale = torch.maximum(scale, sums * magnitude)
        largest = torch.finfo(dtype).max
        return Reference(y, scale.nan_to_num(), _AS_GIVEN, bits, largest)

    def _codes_reference(self, operand: Value, number: NumberFormat, y: torch.Tensor) -> Reference:
        scales = torch.cat([_scale_of_values(part) for part in operand.operands]).view(y.shape)
        quotients = torch.where(scales == 0, 0.0, y / scales).clamp(-number.top, number.top)
        quotients = torch.where(y.isnan(), y, quotients)
        sums = self.bits + _CODE_BITS
        if number.kind == "float":
            of = number.float_type
            magnitude = quotients.nan_to_num().abs()
            exponents = torch.frexp(magnitude.clamp(min=2.0 ** (1 - of.bias))).exponent - 1
            half_steps = 2.0 ** (exponents.double() - of.mantissa_bits - 1)
            return Reference(quotients, magnitude, sums, _EXACT_BITS, slack=half_steps)
        top = torch.full_like(quotients, number.top)
        return Reference(quotients, top, sums, _EXACT_BITS, slack=_CODE_SLACK)

    @property
    def bits(self) -> int:
        """Significant bits to which a kernel may round terms and results."""
        if self.spec.rounds_to is not None:
            return self.spec.rounds_to
        return BF16_BITS if self.spec.output == "bf16" else FP16_BITS


def _scale_of_values(operand: Operand) -> torch.Tensor:
    """The scale of each value of an operand, float64 [rows, K]."""
    ones = replace(operand, values=torch.ones_like(operand.values), zero_points=None)
    return ones.dequantize()


@lru_cache(maxsize=256)
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
