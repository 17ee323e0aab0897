"""Operations: definitions as data, their registry, and one operation at one set of parameters.

A definition is a file `flexq_bench/kernels/operations/NAME.py` with a module-level `OPERATION`;
user files declare theirs with `declare`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib import resources
from math import ceil
from typing import Any, Literal, Protocol

from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.expressions import FUNCTIONS, Value, evaluate, names_of
from flexq_bench.workloads.names import unknown

# Larger values are typing errors: the widest published layer is under 2^18.
MAX_DIMENSION = 1 << 24
SCALE_BYTES = 2  # scales are FP16

Role = Literal["weight", "activation", "state", "index"]
ROLES: tuple[Role, ...] = ("weight", "activation", "state", "index")
INTEGERS = ("int8", "int32", "int64", "bool", "uint8")
DTYPES = ("fp16", "bf16", "fp32", "fp64", "fp8", *INTEGERS)
DISTRIBUTIONS = ("normal", "outliers", "weight", "uniform", "ones")
BELOW = "below "  # begins a distribution of integers
GPUS = "gpus"  # a parameter: their number, one process on each
FORMATS = ("weight", "activation", "cache", "dtype")  # numbers that the kernel declares

_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
_WORD = re.compile(r"[a-z][a-z0-9_.+-]{0,40}")
_ITEM = re.compile(r"(?P<name>[a-z][a-z0-9_]*)=(?P<value>[0-9]{1,18}|[a-z][a-z0-9_.+-]*)")


def packed_bytes(rows: int, columns: int, bits: int, group: int | None) -> int:
    """Return the bytes of a packed matrix and its FP16 scales.

    bits: per value. group: columns that share a scale; None: one scale per row for integers of up
    to 8 bits, no scales for 16-bit numbers.
    """
    codes = rows * ((columns * bits + 7) // 8)
    if group is not None:
        return codes + rows * -(-columns // group) * SCALE_BYTES
    return codes + (rows * SCALE_BYTES if bits <= 8 else 0)


class HasSize(Protocol):
    """A number format, as far as the size of its matrices goes."""

    @property
    def bits(self) -> int: ...
    @property
    def group(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Parameter:
    """A named number of an operation, or one of several words.

    choices: the words; empty: a number from `minimum` to `maximum`. default None: it must be given.
    is_axis: pages draw results over it.
    """

    name: str
    summary: str
    minimum: int = 1
    default: Value | None = None
    is_axis: bool = False
    choices: tuple[str, ...] = ()
    maximum: int = MAX_DIMENSION

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise WorkloadError(f"a parameter's name is like head_dim, got {self.name!r}")
        for word in self.choices:
            if not _WORD.fullmatch(word):
                raise WorkloadError(f"{self.name}: a choice is a word like paged, got {word!r}")
        if self.default is not None:
            self.check(self.default)

    def check(self, value: object) -> Value:
        """Return the value. Raises WorkloadError if the parameter can't have it."""
        if self.choices:
            if not isinstance(value, str) or value not in self.choices:
                raise WorkloadError(unknown(self.name, str(value), self.choices))
            return value
        if type(value) is not int or not self.minimum <= value <= self.maximum:
            shown = f"{value:,}" if type(value) is int else repr(value)
            raise WorkloadError(
                f"{self.name} must be from {self.minimum} to {self.maximum:,}, got {shown}: "
                f"it is {self.summary or 'a number'}"
            )
        return value


@dataclass(frozen=True, slots=True)
class Input:
    """A named tensor that a kernel reads. shape: expressions of parameters.

    number: one of DTYPES or FORMATS ("dtype": the type that the kernel declares for its output), or
    the name of a number format. role: a weight is cold and exchanged between launches, an
    activation is warm and redrawn, a state (as a KV cache) is cold, an index (as routing) are
    integers. distribution: how it is drawn, one of DISTRIBUTIONS, or `below EXPRESSION` for
    integers; inputs that the definition's `draw` returns need none.
    """

    name: str
    shape: tuple[str, ...]
    number: str
    role: Role
    distribution: str = "normal"


@dataclass(frozen=True, slots=True)
class Output:
    """A named tensor that a kernel writes or returns. shape and number as of Input."""

    name: str
    shape: tuple[str, ...]
    number: str


@dataclass(frozen=True, slots=True)
class Operation:
    """Definition of an operation.

    bytes: expression of the bytes that any implementation must move at least; it may call
    `weight_bytes(rows, columns)`, `activation_bytes`, `cache_bytes` and `dtype_bytes`, of matrices
    in the kernel's formats. operations: expression of its multiplications and additions; empty: not
    counted.
    reference: computes the outputs from the inputs in float64, from parameters and the kernel's
    number formats (FORMATS), all by name; a dict of tensors, NaN where any result is right, or of
    tuples: with the magnitude of the terms that were added, to which a result is compared where
    they cancel, and with the changes (root sum of squares) if each intermediate result that may be
    rounded to the kernel's type changes by its own magnitude. draw(values, generator): returns
    inputs that have no distribution, by name. accepts: from inputs, outputs and parameters by name,
    returns for outputs by name which elements are right, instead of comparing them.
    Raises WorkloadError if names are of the wrong form, repeat or are unknown to an expression.
    """

    name: str
    summary: str
    parameters: tuple[Parameter, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    bytes: str = ""
    operations: str = ""
    stages: tuple[str, ...] = ("op",)
    reference: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    draw: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    accepts: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise WorkloadError(f"an operation's name is like attention_decode, got {self.name!r}")
        tensors = len(self.inputs) + len(self.outputs)
        if len(self._by_name) < len(self.parameters) or len(self._shapes) < tensors:
            raise WorkloadError(f"{self.name}: two parameters or two tensors have the same name")
        if self.is_of_gpus and not all(shape[:1] == (GPUS,) for shape in self._shapes.values()):
            raise WorkloadError(f"{self.name}: row i is of GPU i: begin all shapes with {GPUS}")
        for tensor in self.inputs:
            if tensor.role not in ROLES:
                raise WorkloadError(f"{self.name}: {unknown('role', tensor.role, ROLES)}")
            if tensor.distribution.startswith(BELOW):
                self._check_names(tensor.distribution.removeprefix(BELOW), set(FUNCTIONS))
            elif tensor.distribution not in DISTRIBUTIONS:
                known = (*DISTRIBUTIONS, f"{BELOW}EXPRESSION")
                raise WorkloadError(
                    f"{self.name}: {unknown('distribution', tensor.distribution, known)}"
                )
        functions, sizes = set(FUNCTIONS), {f"{name}_bytes" for name in FORMATS}
        for shape in self._shapes.values():
            for text in shape:
                self._check_names(text, functions)
        for text in filter(None, (self.bytes, self.operations)):
            self._check_names(text, functions | sizes)

    @property
    def _by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    @property
    def _shapes(self) -> dict[str, tuple[str, ...]]:
        inputs = {tensor.name: tensor.shape for tensor in self.inputs}
        return inputs | {tensor.name: tensor.shape for tensor in self.outputs}

    @property
    def is_of_gpus(self) -> bool:
        """Return True if it has one process on each of several GPUs."""
        return GPUS in self._by_name

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the parameters that pages draw results over."""
        return tuple(parameter.name for parameter in self.parameters if parameter.is_axis)

    def _check_names(self, text: str, functions: set[str]) -> None:
        for name in names_of(text) - functions - self._by_name.keys():
            known = (*self._by_name, *sorted(functions))
            raise WorkloadError(f"{self.name}: {text!r}: {unknown('parameter', name, known)}")

    def checked(self, values: Mapping[str, object]) -> dict[str, Value]:
        """Return all parameters in the declared order, with defaults.

        Raises WorkloadError if one is missing, unknown or out of range.
        """
        for name in values:
            if name not in self._by_name:
                raise WorkloadError(f"{self.name}: {unknown('parameter', name, self._by_name)}")
        checked: dict[str, Value] = {}
        for parameter in self.parameters:
            value = values.get(parameter.name, parameter.default)
            if value is None:
                raise WorkloadError(
                    f"{self.name} needs {parameter.name}: {parameter.summary or 'a number'}"
                )
            checked[parameter.name] = parameter.check(value)
        return checked

    def workload(self, **values: Value) -> OperationWorkload:
        """Return the operation at these parameters. Raises WorkloadError as `checked`."""
        return OperationWorkload(self.name, tuple(self.checked(values).items()))

    def parse(self, text: str) -> dict[str, Value]:
        """Return the values of `tokens=8 experts=128`, with commas or spaces between.

        Raises WorkloadError if it has another form, and as `checked`.
        """
        return self.checked(dict(parse_values(text)))

    def format(self, values: Mapping[str, Value]) -> str:
        """Return the values as text: all parameters, in the declared order.

        Raises WorkloadError as `checked`.
        """
        return format_values(tuple(self.checked(values).items()), " ")

    def evaluate(
        self,
        text: str,
        values: Mapping[str, Value],
        formats: Mapping[str, HasSize] | None = None,
    ) -> int | float:
        """Return an expression's value. formats: the kernel's, by names of FORMATS.

        Raises WorkloadError if it can't be evaluated.
        """
        sizes = {
            f"{name}_bytes": _size(number_format) for name, number_format in (formats or {}).items()
        }
        return evaluate(text, self.checked(values), sizes)

    def shape_of(self, tensor: str, values: Mapping[str, Value]) -> tuple[int, ...]:
        """Return the shape of an input or output.

        Raises WorkloadError if there is none of this name, or if a dimension is not a whole number.
        """
        texts = self._shapes.get(tensor)
        if texts is None:
            raise WorkloadError(f"{self.name}: {unknown('tensor', tensor, self._shapes)}")
        shape = [self.evaluate(text, values) for text in texts]
        for text, size in zip(texts, shape, strict=True):
            if not isinstance(size, int) or size < 0:
                raise WorkloadError(f"{self.name}: {text} of {tensor} is {size}: no dimension")
        return tuple(map(ceil, shape))


@dataclass(frozen=True, slots=True, order=True)
class OperationWorkload:
    """One operation at one set of parameters, in the declared order."""

    operation: str
    values: tuple[tuple[str, Value], ...]

    @property
    def operations(self) -> int | float | None:
        """Multiplications and additions. None: its definition counts none.

        Raises WorkloadError if the operation is not known here.
        """
        definition = operation(self.operation)
        if not definition.operations:
            return None
        return definition.evaluate(definition.operations, dict(self.values))

    @property
    def gpus(self) -> int:
        """Number of GPUs: its parameter `gpus`; 1 without one."""
        gpus = dict(self.values).get(GPUS, 1)
        return gpus if isinstance(gpus, int) else 1

    @property
    def key(self) -> str:
        """Part of a case's key: `attention_decode:batch=1,heads=32`."""
        return f"{self.operation}:{format_values(self.values, ',')}"

    @classmethod
    def from_key(cls, text: str) -> OperationWorkload:
        """Parse `key`, also of an operation that is not known here.

        Raises WorkloadError if the text has another form.
        """
        name, separator, values = text.partition(":")
        if not separator or not _NAME.fullmatch(name):
            raise WorkloadError(f"an operation is written name:parameter=value,…, got {text!r}")
        return cls(name, parse_values(values))


def parse_values(text: str) -> tuple[tuple[str, Value], ...]:
    """Parse `tokens=8 cache=paged`, with commas or spaces between; digits are a number.

    Raises WorkloadError if an item has another form or a name repeats.
    """
    values: dict[str, Value] = {}
    for item in text.replace(",", " ").split():
        match = _ITEM.fullmatch(item)
        if match is None or match["name"] in values:
            fault = "repeats a name" if match else "is not parameter=value"
            raise WorkloadError(f"{item!r} in {text[:60]!r} {fault}: write tokens=8 cache=paged")
        value = match["value"]
        values[match["name"]] = int(value) if value.isdigit() else value
    return tuple(values.items())


def format_values(values: tuple[tuple[str, Value], ...], separator: str) -> str:
    """Write values as `tokens=8 cache=paged`."""
    return separator.join(f"{name}={value}" for name, value in values)


def describe(operation: str, parameters: str) -> str:
    """Return a workload for people: `M=1 N=4096 K=4096`, or `attention_decode batch=1 heads=32`.

    operation empty: no known one.
    """
    if operation in ("linear", ""):
        return parameters.upper()
    return f"{operation} {parameters}".strip()


def natural_order(parameters: str) -> tuple[tuple[bool, int, str], ...]:
    """Return a key that sorts texts of parameters by their numbers."""
    values = (value for _, value in parse_values(parameters))
    return tuple((True, 0, v) if isinstance(v, str) else (False, v, "") for v in values)


_declared: dict[str, Operation] = {}


def declare(definition: Operation) -> Operation:
    """Add an operation of a user's file to the registry, and return it.

    Raises WorkloadError if another one has its name.
    """
    known = _declared.get(definition.name)
    if definition.name in _shipped() or (known is not None and known != definition):
        raise WorkloadError(
            f"there is another operation {definition.name!r}: give yours another name"
        )
    _declared[definition.name] = definition
    return definition


_FUNCTIONS = ("reference", "draw", "accepts")


def declared_as_plain(name: str) -> dict[str, Any] | None:
    """Return a declared operation as JSON values, without its functions; None: it is shipped."""
    if name in _shipped():
        return None
    values = asdict(operation(name))
    return {key: value for key, value in values.items() if key not in _FUNCTIONS}


def declare_plain(values: Mapping[str, Any]) -> Operation:
    """Declare an operation by the values of `declared_as_plain`.

    Raises WorkloadError as `declare`, TypeError if they are others.
    """
    parts: dict[str, Any] = {}
    for name, kind in (("parameters", Parameter), ("inputs", Input), ("outputs", Output)):
        parts[name] = tuple(kind(**_with_tuples(part)) for part in values[name])
    return declare(Operation(**{**_with_tuples(values), **parts}))


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def operation(name: str) -> Operation:
    """Return the definition of this name. Raises WorkloadError if there is none."""
    if name in _declared:
        return _declared[name]
    if name not in _shipped():
        raise WorkloadError(unknown("operation", name, operation_names()))
    return _definition(name)


def operation_names() -> tuple[str, ...]:
    """Return the names of all operations: `linear`, the other shipped ones, then declared ones."""
    first = sorted(_shipped(), key=lambda name: (name != "linear", name))
    return (*first, *sorted(_declared))


@lru_cache(maxsize=1)
def _shipped() -> frozenset[str]:
    folder = resources.files("flexq_bench") / "kernels" / "operations"
    files = (file.name for file in folder.iterdir()) if folder.is_dir() else ()
    return frozenset(
        name.removesuffix(".py") for name in files if re.fullmatch(r"[a-z][a-z0-9_]*\.py", name)
    )


@lru_cache(maxsize=64)
def _definition(name: str) -> Operation:
    definition: Operation = importlib.import_module(
        f"flexq_bench.kernels.operations.{name}"
    ).OPERATION
    if definition.name != name:
        raise WorkloadError(f"kernels/operations/{name}.py defines {definition.name}: rename it")
    return definition


def _size(number: HasSize) -> Callable[[int, int], int]:
    return lambda rows, columns: packed_bytes(rows, columns, number.bits, number.group)
