"""A plain function over codes and scales as a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexq_bench.kernels.contract import (
    Backend,
    Capability,
    CheckedGemm,
    Config,
    GemmCall,
    KernelSpec,
    LinearKernel,
    PackedOperand,
    checked_scales,
)
from flexq_bench.kernels.errors import KernelError, ShapeError
from flexq_bench.kernels.external.external_code import note_declared
from flexq_bench.kernels.formats import NumberFormat, Operand, quantize
from flexq_bench.workloads.case import Stage
from flexq_bench.workloads.gemm import GemmWorkload

Function = Callable[..., object]
Tensors = torch.Tensor | Sequence[torch.Tensor]
Configurations = Sequence[Mapping[str, Any]] | Callable[[GemmWorkload], Sequence[Mapping[str, Any]]]

BACKENDS: tuple[Backend, ...] = ("cpu", "cuda")
_ACTIVATIONS = ("symmetric", "float", "dense")
_WEIGHTS = (*_ACTIVATIONS, "balanced", "asymmetric")
_BUFFER = "prepared{}"  # names of the tensors that prepare_weight returned


class DefinitionError(KernelError, ValueError):
    """An invalid declaration of an external kernel; the message says how to correct it."""


@dataclass(frozen=True, slots=True)
class FunctionConfig(Config):
    """A configuration of a function: keyword arguments, in order."""

    arguments: tuple[tuple[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the arguments as they are stored, and compared with stored ones."""
        return {name: _as_json(value) for name, value in self.arguments}


@dataclass(frozen=True, eq=False)
class FunctionDefinition:
    """A decorated function with its declaration; calling it calls the function.

    The fields are the arguments of `flexq_bench.api.linear_kernel`.
    """

    function: Function
    name: str
    weight: NumberFormat
    activation: NumberFormat
    variant: str = ""
    backends: tuple[Backend, ...] = BACKENDS
    prepare_weight: Callable[..., Tensors] | None = None
    quantize_activation: Callable[..., object] | None = None
    configurations: Configurations = ()
    min_capability: Capability = (8, 0)
    rounds_to: int | None = None
    summary: str = ""
    machine_code: Callable[[str], bytes] | None = None

    def __post_init__(self) -> None:
        self._check_arguments()
        for what, number, kinds in (
            ("weight", self.weight, _WEIGHTS),
            ("activation", self.activation, _ACTIVATIONS),
        ):
            if number.kind not in kinds:
                raise DefinitionError(
                    f"{self.name}: a function takes no {what} of format {number.name}: write a "
                    "LinearKernel for it"
                )
        if self.weight.kind == "asymmetric" and not self.activation.is_dense:
            raise DefinitionError(
                f"{self.name}: weights with zero points go with activation='fp16': write a "
                "LinearKernel for others"
            )
        for backend in self.backends:
            if backend not in BACKENDS:
                raise DefinitionError(f"{self.name}: no backend {backend!r}: there are cpu, cuda")
        if not self.backends:
            raise DefinitionError(f"{self.name}: backends is empty: name cpu, cuda or both")
        note_declared(self)

    def _check_arguments(self) -> None:
        for what in ("function", "prepare_weight", "quantize_activation", "machine_code"):
            value = getattr(self, what)
            if not callable(value) and (value is not None or what == "function"):
                raise DefinitionError(f"{self.name}: {what} must be a function, got {value!r:.80}")
        if not callable(self.configurations):
            _check_configurations(self.name, self.configurations)
        capability = self.min_capability
        if not isinstance(capability, Sequence) or [type(number) for number in capability] != [
            int,
            int,
        ]:
            raise DefinitionError(
                f"{self.name}: min_capability must be two integers, as (8, 0), got {capability!r}"
            )

    def __call__(self, *arguments: Any, **named: Any) -> object:
        return self.function(*arguments, **named)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Includes `linear` if FP16 activations need no codes, or if the author quantizes them."""
        makes_codes = self.activation.is_dense or self.quantize_activation is not None
        return ("gemm", "linear") if makes_codes else ("gemm",)

    def kernels(self) -> tuple[LinearKernel, ...]:
        """Return the kernel on each of its backends."""
        return tuple(FunctionKernel(self, backend) for backend in self.backends)


class FunctionKernel(CheckedGemm):
    """Calls the function of a definition with the tensors of its formats.

    For an operand these are codes and scales [row blocks, groups], for a dense format only FP16
    values; after the scales there are zero points of an asymmetric format, and the matrix's scale
    of `nvfp4`. Tensors that `prepare_weight`
    returned replace those of the weights. Raises KernelError if the function returned anything
    other than `out`, or changed its memory, shape or type.
    """

    def __init__(self, definition: FunctionDefinition, backend: Backend) -> None:
        self._definition = definition
        doc = getattr(definition.function, "__doc__", None)
        first_line = doc.strip().partition("\n")[0] if isinstance(doc, str) else ""
        self.spec = KernelSpec(
            name=definition.name,
            variant=definition.variant,
            backend=backend,
            weight=definition.weight,
            activation=definition.activation,
            summary=definition.summary or first_line.rstrip(".") or "an external kernel",
            stages=definition.stages,
            min_capability=definition.min_capability,
            rounds_to=definition.rounds_to,
            integer_sums=False,  # a function may dequantize its operands first
        )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        buffers = _buffers(weight, self.spec.weight)
        if self._definition.prepare_weight is None:
            return PackedOperand(buffers, weight.rows, weight.k)
        made = self._definition.prepare_weight(*buffers.values())
        tensors = (made,) if isinstance(made, torch.Tensor) else tuple(made)
        if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise DefinitionError(
                f"{self.spec.label}: prepare_weight must return a tensor or several, got "
                f"{type(made).__name__}"
            )
        # Clones: copies of the weights are rewritten in place, and must not share memory.
        prepared = {_BUFFER.format(i): tensor.clone() for i, tensor in enumerate(tensors)}
        return PackedOperand(prepared, weight.rows, weight.k)

    def pack_activation(self, x: Operand) -> PackedOperand:
        return PackedOperand(_buffers(x, self.spec.activation), x.rows, x.k)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        zeros = torch.zeros(m, k, dtype=torch.float16, device=device)
        return self.pack_activation(quantize(zeros, self.spec.activation))

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        if self.spec.activation.is_dense:
            packed.buffers["values"].copy_(x)
            return
        # otherwise the kernel does not have this stage
        assert self._definition.quantize_activation is not None
        self._definition.quantize_activation(x, *packed.buffers.values())

    def activated(self, x: torch.Tensor, packed: PackedOperand) -> PackedOperand:
        if self.spec.activation.is_dense:
            return PackedOperand({"values": x}, packed.rows, packed.k)
        return super().activated(x, packed)

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, _ = call
        before = _identity(out)
        arguments = dict(config.arguments) if isinstance(config, FunctionConfig) else {}
        tensors = (*x.buffers.values(), *w.buffers.values(), out)
        returned = self._definition.function(*tensors, **arguments)
        self._check(returned, out, before)
        if bias is not None:
            out.add_(bias)

    def read_only(self) -> frozenset[str]:
        return frozenset("x" if self._definition.prepare_weight is not None else "xw")

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        configurations = self._definition.configurations
        if callable(configurations):
            configurations = configurations(gemm)
            _check_configurations(self.spec.label, configurations)
        return tuple(FunctionConfig(tuple(arguments.items())) for arguments in configurations)

    def default_config(self, gemm: GemmWorkload) -> Config | None:
        return next(iter(self.candidates(gemm)), None)

    def machine_code(self, target: str) -> bytes | None:
        compiled = self._definition.machine_code
        return None if compiled is None else compiled(target)

    def _check(self, returned: object, out: torch.Tensor, before: tuple[object, ...]) -> None:
        if returned is not None and returned is not out:
            raise ShapeError(
                f"{self.spec.label} returned {_described(returned)}: write the result into out and "
                "return nothing"
            )
        if _identity(out) != before:
            raise ShapeError(
                f"{self.spec.label} exchanged out for {_described(out)}: write into the memory "
                "that out has"
            )


def _check_configurations(name: str, configurations: object) -> None:
    """Raise DefinitionError unless they are dicts that JSON can store and that compare by value."""
    if not isinstance(configurations, Sequence) or not all(
        isinstance(arguments, Mapping) and all(isinstance(key, str) for key in arguments)
        for arguments in configurations
    ):
        raise DefinitionError(
            f"{name}: configurations must be a list of dicts of keyword arguments, "
            f"got {configurations!r:.80}"
        )
    for key, value in (item for arguments in configurations for item in arguments.items()):
        if not _is_plain(value):
            raise DefinitionError(
                f"{name}: configurations: {key} must be a number, a text, None or a tuple of "
                f"them, got {value!r:.80}"
            )


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | None)


def _as_json(value: object) -> object:
    return [_as_json(item) for item in value] if isinstance(value, tuple | list) else value


def _buffers(operand: Operand, fmt: NumberFormat) -> dict[str, torch.Tensor]:
    """Return the tensors of an operand that a function gets, in order."""
    if fmt.is_dense:
        return {"values": operand.values}
    checked_scales(operand, fmt)
    assert operand.block_scales is not None  # as checked
    buffers = {"codes": operand.values, "scales": operand.block_scales}
    if operand.row_scales is not None:
        buffers["matrix_scale"] = operand.row_scales[0].contiguous()
    if operand.zero_points is not None:
        buffers["zero_points"] = operand.zero_points
    return buffers


def _identity(out: torch.Tensor) -> tuple[object, ...]:
    """Return the properties of `out` that the function must not change.

    The type is one of them, because a tensor subclass may compute its values on access.
    """
    return (type(out), out.data_ptr(), tuple(out.shape), tuple(out.stride()), out.dtype)


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        kind = "" if type(value) is torch.Tensor else f"{type(value).__name__} "
        return f"{kind}{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"
