"""A function declared to be a kernel: what it is given, what it returns, and how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from flexq_bench.kernels.contract import (
    Backend,
    Capability,
    Config,
    KernelSpec,
    PackedOperand,
)
from flexq_bench.kernels.errors import KernelError, ShapeError
from flexq_bench.kernels.external_packages.packages import Package
from flexq_bench.kernels.formats import FP16, NumberFormat
from flexq_bench.kernels.operand_tensors import number_of, parts_of
from flexq_bench.workloads.case import Stage
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import Input, Operation, OperationWorkload, Output

Function = Callable[..., object]
Tensors = Any  # a tensor, or several tensors and static values
Workload = GemmWorkload | OperationWorkload
Configurations = Sequence[Mapping[str, Any]] | Callable[..., Sequence[Mapping[str, Any]]]

BACKENDS: tuple[Backend, ...] = ("cpu", "cuda")
LINEAR = "linear"
_FUNCTIONS = (
    "function",
    "prepare_weight",
    "prepare_state",
    "prepare_activation",
    "quantize_activation",
    "machine_code",
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


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
class Declaration:
    """The fields are the arguments of `flexq_bench.api.kernel`."""

    function: Function
    name: str
    definition: Operation
    weight: NumberFormat = FP16
    activation: NumberFormat = FP16
    cache: NumberFormat = FP16
    dtype: str = "fp16"
    variant: str = ""
    backends: tuple[Backend, ...] = BACKENDS
    returns: bool = False
    prepare_weight: Callable[..., Tensors] | None = None
    prepare_state: Callable[..., Tensors] | None = None
    prepare_activation: Callable[..., Tensors] | None = None
    quantize_activation: Callable[..., Any] | None = None
    configurations: Configurations = ()
    min_capability: Capability = (8, 0)
    rounds_to: int | None = None
    updates: tuple[tuple[str, str], ...] = ()
    summary: str = ""
    machine_code: Callable[[str], bytes | None] | None = None
    package: Package | None = None
    version: int = 1

    def __post_init__(self) -> None:
        for what in _FUNCTIONS:
            value = getattr(self, what)
            if not callable(value) and (value is not None or what == "function"):
                raise DefinitionError(f"{self.name}: {what} must be a function, got {value!r:.80}")
        if not callable(self.configurations):
            check_configurations(self.name, self.configurations)
        capability = self.min_capability
        if not isinstance(capability, Sequence) or [type(number) for number in capability] != [
            int,
            int,
        ]:
            raise DefinitionError(
                f"{self.name}: min_capability must be two integers, as (8, 0), got {capability!r}"
            )
        for backend in self.backends:
            if backend not in BACKENDS:
                raise DefinitionError(f"{self.name}: no backend {backend!r}: there are cpu, cuda")
        if not self.backends:
            raise DefinitionError(f"{self.name}: backends is empty: name cpu, cuda or both")
        if self.is_linear:
            self._check_linear()
        self._check_updates()
        if self.definition.is_of_gpus:
            self._check_ranks()
        for what in ("prepare_activation", "quantize_activation"):
            if not self.is_linear and getattr(self, what) is not None:
                raise DefinitionError(
                    f"{self.name}: {what} is of linear kernels: {self.definition.name} has its "
                    "activations in their format"
                )

    @property
    def is_linear(self) -> bool:
        return self.definition.name == LINEAR

    def _check_updates(self) -> None:
        inputs = {} if self.is_linear else {i.name: i for i in self.definition.inputs}
        outputs = {} if self.is_linear else {o.name: o for o in self.definition.outputs}
        prepared = {"weight": self.prepare_weight, "state": self.prepare_state}
        for name, of in self.updates:
            output, given = outputs.get(name), inputs.get(of)
            if (
                output is None
                or given is None
                or (output.shape, output.number) != (given.shape, given.number)
                or prepared.get(given.role) is not None
            ):
                raise DefinitionError(
                    f"{self.name}: updates: {name} of {self.definition.name} can't be written in "
                    f"{of}: name an output, and an input of its shape and number that is not "
                    "prepared"
                )

    def _check_ranks(self) -> None:
        unused = ("prepare_weight", "prepare_state", "configurations", "updates")
        if given := [what for what in unused if getattr(self, what)]:
            raise DefinitionError(
                f"{self.name}: a function of several GPUs has no {' and no '.join(given)}"
            )
        spec = self.spec(self.backends[0])
        tensors: Sequence[Input | Output] = (*self.definition.inputs, *self.definition.outputs)
        for tensor in tensors:
            if not isinstance(number_of(tensor.number, spec), torch.dtype):
                raise DefinitionError(
                    f"{self.name}: {tensor.name} of {self.definition.name} is quantized: on "
                    "several GPUs, declare its parts as tensors of their own types"
                )

    def _check_linear(self) -> None:
        if self.prepare_state is not None:
            raise DefinitionError(f"{self.name}: a linear kernel has no state to prepare")
        activation, weight = self.activation, self.weight
        if activation.kind in ("asymmetric", "normal", "dual", "mixed") and not (
            activation.kind == weight.kind == "mixed"
        ):
            raise DefinitionError(
                f"{self.name}: a function takes no activation of format {activation.name}: write a "
                "LinearKernel for it"
            )
        if weight.kind == "mixed" and activation.kind != "mixed":
            raise DefinitionError(
                f"{self.name}: weights of format {weight.name} have their channels in an order "
                "that activations share: declare the same format for both"
            )
        groups = sorted(number.group for number in (weight, activation) if number.group)
        if groups and groups[-1] % groups[0]:
            raise DefinitionError(
                f"{self.name}: groups of {weight.group} and {activation.group} values of k don't "
                "divide each other: declare lengths of which one divides the other"
            )
        gets = ["..."] if self.prepare_activation is not None else _named("x", activation)
        gets += ["..."] if self.prepare_weight is not None else _named("w", weight)
        gets += [] if self.returns else ["out"]
        self._check_count(gets)

    def _check_count(self, gets: Sequence[str]) -> None:
        """Raise DefinitionError if the function can't take these tensors ("...": any number)."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # compiled code has none
            return
        is_choosing = callable(self.configurations)
        chosen = () if callable(self.configurations) else self.configurations
        keywords = {name for arguments in chosen for name in arguments}
        positional = [p for p in parameters if p.kind in _POSITIONAL and p.name not in keywords]
        least = 0 if is_choosing else sum(p.default is p.empty for p in positional)
        most = len(positional)
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            most = len(gets) + least
        # What prepare_weight makes may be any number of tensors.
        if len(gets) > most or (len(gets) < least and "..." not in gets):
            raise DefinitionError(
                f"{self.name}: the function takes {most} tensors and gets "
                f"{', '.join(gets)}: give it these arguments"
            )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Of a linear kernel, `linear` too if real activations need no codes, or if the author
        quantizes them.
        """
        if not self.is_linear:
            return ("op",)
        makes_codes = self.activation.is_dense or self.quantize_activation is not None
        return ("gemm", "linear") if makes_codes else ("gemm",)

    def spec(self, backend: Backend) -> KernelSpec:
        """Return the kernel's spec on a backend."""
        doc = getattr(self.function, "__doc__", None)
        first_line = doc.strip().partition("\n")[0] if isinstance(doc, str) else ""
        return KernelSpec(
            name=self.name,
            variant=self.variant,
            backend=backend,
            weight=self.weight,
            activation=self.activation,
            summary=self.summary or first_line.rstrip(".") or "an external kernel",
            stages=self.stages,
            min_capability=self.min_capability,
            rounds_to=self.rounds_to,
            updates=self.updates,
            integer_sums=False,  # a function may dequantize its operands first
            reads_weights=self.is_linear
            or any(tensor.role in ("weight", "state") for tensor in self.definition.inputs),
            output=self.dtype,
            operation=self.definition.name,
            cache=self.cache,
            package=self.package,
            version=self.version,
        )

    @cached_property
    def keywords(self) -> frozenset[str]:
        """Names of the function's keyword-only arguments, which parameters are passed to."""
        return keywords_of(self.function)

    def configs(self, label: str, workload: Workload) -> Sequence[Config]:
        """Return the configurations of a shape. Raises DefinitionError for invalid ones."""
        configurations = self.configurations
        if callable(configurations):
            configurations = configurations(workload)
            check_configurations(label, configurations)
        return tuple(FunctionConfig(tuple(arguments.items())) for arguments in configurations)

    def call(
        self,
        label: str,
        given: Sequence[object],
        outs: Sequence[torch.Tensor],
        values: Mapping[str, object],
        config: Config | None,
        updated: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor] | None:
        """Call the function: what it returned, if it is declared to return its outputs.

        updated: the inputs that it writes into. Raises KernelError if it returned anything else, or
        changed the memory, shape or type of one of these or of an output.
        """
        named = {name: values[name] for name in self.keywords if name in values}
        if isinstance(config, FunctionConfig):
            named |= dict(config.arguments)
        written = [*updated, *(() if self.returns else outs)]
        before = [_identity(out) for out in written]
        made = None
        if self.returns:
            made = _checked_outputs(label, self.function(*given, **named), outs)
        else:
            returned = self.function(*given, *outs, **named)
            if returned is not None and not any(returned is out for out in outs):
                raise ShapeError(
                    f"{label} returned {_described(returned)}: write the result into out and "
                    "return nothing, or declare returns=True"
                )
        for out, identity in zip(written, before, strict=True):
            if _identity(out) != identity:
                raise ShapeError(
                    f"{label} exchanged out for {_described(out)}: write into the memory that out "
                    "has"
                )
        return made


class Prepared:
    """Results of a `prepare` function: tensors, of which there are copies, and static values.

    Static values are those of the first weights of a shape, so they can't depend on contents.
    """

    def __init__(
        self, label: str, what: str, function: Callable[..., Tensors], prefix: str
    ) -> None:
        self._label, self._what, self._function, self._prefix = label, what, function, prefix
        self._keywords = keywords_of(function)
        self._static: dict[object, dict[int, object]] = {}
        self._count: dict[object, int] = {}

    def make(
        self, shape: object, tensors: Iterable[torch.Tensor], values: Mapping[str, object]
    ) -> dict[str, torch.Tensor]:
        """Call the function; return the tensors by the names of their buffers."""
        named = {name: values[name] for name in self._keywords if name in values}
        made = self._function(*tensors, **named)
        parts = tuple(made) if isinstance(made, tuple | list) else (made,)
        parameters = {i: part for i, part in enumerate(parts) if isinstance(part, torch.Tensor)}
        if not parameters:
            kind = type(made).__name__
            raise DefinitionError(
                f"{self._label}: {self._what} must return a tensor or several, got {kind}"
            )
        static = {i: part for i, part in enumerate(parts) if i not in parameters}
        self._static.setdefault(shape, static)
        self._count.setdefault(shape, len(parts))
        # Clones: copies of the weights are rewritten in place, and must not share memory.
        return {f"{self._prefix}{i}": tensor.clone() for i, tensor in parameters.items()}

    def arguments(self, shape: object, packed: PackedOperand) -> list[object]:
        """Arguments of the function, in order."""
        static, buffers = self._static[shape], packed.buffers
        return [
            static[i] if i in static else buffers[f"{self._prefix}{i}"]
            for i in range(self._count[shape])
        ]


def keywords_of(function: Callable[..., object]) -> frozenset[str]:
    """Names of a function's keyword-only arguments; empty for compiled code."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def check_configurations(name: str, configurations: object) -> None:
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


def _named(operand: str, number: NumberFormat) -> list[str]:
    parts = parts_of(number)
    return [operand] if parts == ("values",) else [f"{operand}_{part}" for part in parts]


def _checked_outputs(label: str, made: object, outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The returned outputs. Raises ShapeError unless they are plain tensors like `outs`."""
    parts: list[Any] = list(made) if isinstance(made, tuple | list) else [made]
    fits = len(parts) == len(outs) and all(
        type(part) is torch.Tensor
        and (part.shape, part.dtype, part.device) == (out.shape, out.dtype, out.device)
        for part, out in zip(parts, outs, strict=False)
    )
    if not fits:
        raise ShapeError(
            f"{label} returned {', '.join(map(_described, parts))}: return "
            f"{', '.join(map(_described, outs))}"
        )
    return parts


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | None)


def _as_json(value: object) -> object:
    return [_as_json(item) for item in value] if isinstance(value, tuple | list) else value


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
