"""Decorators that declare functions to be kernels, and references to be operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flexq_bench.kernels.contract import Backend, Capability
from flexq_bench.kernels.external.declaration import (
    BACKENDS,
    Configurations,
    DefinitionError,
    Function,
    Tensors,
)
from flexq_bench.kernels.external.function_kernel import FunctionDefinition
from flexq_bench.kernels.external_packages.packages import Package
from flexq_bench.kernels.formats import DENSE_TYPES, NumberFormat
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.operation import (
    BELOW,
    DTYPES,
    FORMATS,
    GPUS,
    INTEGERS,
    Input,
    Operation,
    Output,
    Parameter,
    declare,
)
from flexq_bench.workloads.operation import operation as operation_of


def kernel(
    operation: str | Operation,
    name: str,
    *,
    weight: str = "",
    activation: str = "",
    cache: str = "",
    dtype: str = "",
    variant: str = "",
    backends: Sequence[Backend] = BACKENDS,
    returns: bool = False,
    prepare_weight: Callable[..., Tensors] | None = None,
    prepare_state: Callable[..., Tensors] | None = None,
    prepare_activation: Callable[..., Tensors] | None = None,
    quantize_activation: Callable[..., Any] | None = None,
    configurations: Configurations = (),
    min_capability: Capability = (8, 0),
    rounds_to: int | None = None,
    updates: Mapping[str, str] | None = None,
    summary: str = "",
    machine_code: Callable[[str], bytes | None] | None = None,
    package: str | Package = "",
    version: int = 1,
) -> Callable[[Function], FunctionDefinition]:
    """Declare a function to be a kernel of an operation.

    operation: a name of `flexq-bench list operations`, or what `operation` returned. The function
    is called with the tensors of its inputs, in the declared order, then of its outputs, all
    contiguous and on one device. A quantized input is codes, scales and what else its format has
    (see linear_kernel); inputs and outputs without elements are left out. It writes the outputs
    and returns nothing; with `returns`, it gets no outputs and returns them, which are read where
    they are. Keyword-only arguments with names of parameters (`*, top_k`) get their values. All
    launches must go to torch's current stream, and are captured in a CUDA graph.

    weight, activation, cache: number formats of the definition's inputs and outputs of these
    names; default: `dtype`. dtype: `fp16`, `bf16` or `fp32`, of other inputs and outputs; default:
    that of a dense activation, or `fp16`. prepare_weight, prepare_state: called once with the
    tensors of all weights, or of all states, not timed; what it returns, tensors and static values,
    replaces them. package: what must be installed, as `torchao>=0.16,<0.20`. version: of the work
    that it does; results of another one are another series. Other arguments are as of
    `linear_kernel`.

    updates: outputs that the function writes in the memory of an input of the same shape and
    number, as `{"total": "residual"}`; it gets no tensors for these, and doesn't return them. Such
    a kernel is measured cold only: each launch of a sample has inputs of its own, which are
    restored before.

    Raises WorkloadError for an unknown operation, ShapeError for an unknown format, and
    DefinitionError for a declaration that can't run.
    """
    definition = operation if isinstance(operation, Operation) else operation_of(operation)
    if not dtype:
        dense = activation or weight
        dtype = dense if dense in DENSE_TYPES else "fp16"
    if dtype not in DENSE_TYPES:
        raise DefinitionError(f"{name}: no dtype {dtype!r}: there are {', '.join(DENSE_TYPES)}")
    needed = Package.of(package) if isinstance(package, str) else package

    def declared(function: Function) -> FunctionDefinition:
        return FunctionDefinition(
            function,
            name,
            definition,
            NumberFormat.parse(weight or dtype),
            NumberFormat.parse(activation or dtype),
            NumberFormat.parse(cache or dtype),
            dtype,
            variant,
            tuple(backends),
            returns,
            prepare_weight,
            prepare_state,
            prepare_activation,
            quantize_activation,
            configurations,
            min_capability,
            rounds_to,
            tuple(sorted((updates or {}).items())),
            summary,
            machine_code,
            needed,
            version,
        )

    return declared


def linear_kernel(
    name: str, *, weight: str, activation: str = "fp16", **options: Any
) -> Callable[[Function], FunctionDefinition]:
    """Declare a function to be a kernel, Y[M,N] = X[M,K] · W[N,K]^T.

    weight, activation: number formats, for example `int6/128` (6-bit integers, an FP16 scale for
    every 128 values of k), `int8/row` (one scale per row), `uint4/128` (with zero points),
    `fp8/128x128` (E4M3), `mxfp4`, or `fp16`, `bf16` and `fp32` (dense). The function is called as

        function(x_codes, x_scales, w_codes, w_scales, out)      both quantized
        function(x, w_codes, w_scales, out)                      activation="fp16"
        function(x, w_codes, w_scales, w_zero_points, out)       weight="uint4/128"

    with x_codes int8 [M,K], w_codes int8 [N,K] (or E4M3), scales FP16 [rows, ceil(K / group)], zero
    points int8 (int16 for 8 bits), which are added to codes, x [M,K], and out [M,N] of type dtype.
    Floats of less than 8 bits are numbers in FP16. All are contiguous and on one device. The
    function writes to out and returns nothing. All launches must go to torch's current stream. The
    function is captured in a CUDA graph, so it must not synchronize with the device.

    options: those of `kernel`. backends: on which the function runs. prepare_weight(w_codes,
    w_scales): called once, not timed; what it returns replaces w_codes and w_scales: tensors, and
    static values, which can't depend on the weights' contents.
    prepare_activation(x_codes, x_scales): as prepare_weight, of quantized activations.
    quantize_activation(x, x_codes, x_scales): writes the codes and scales of x in the activation's
    format, as prepared; with `returns`, quantize_activation(x) returns them. With it, or with a
    dense activation, the kernel also has the stage
    `linear`. configurations: keyword arguments of the function to choose from by timing, or a
    function that maps a GemmWorkload to them; the first is the default. min_capability: of a GPU.
    rounds_to: see KernelSpec. machine_code(target): returns the cubin for an architecture, for
    example "sm_90", which `gate static` compares; `compile_cuda` compiles one from CUDA C++.
    summary: one line; default: the first line of the docstring. name, variant: lower-case letters,
    digits, dots and hyphens; the name is prefixed with the package or the file's stem.

    Raises ShapeError for an unknown format, DefinitionError for one that functions don't support.
    """

    return kernel("linear", name, weight=weight, activation=activation, **options)


def operation(
    name: str,
    *,
    parameters: Sequence[Parameter | str],
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    bytes: str = "",
    operations: str = "",
    summary: str = "",
    draw: Callable[..., Any] | None = None,
    accepts: Callable[..., Any] | None = None,
) -> Callable[[Function], Operation]:
    """Declare an operation by its reference; `kernel` takes what this returns.

    The reference gets inputs in float64, indices and parameters by name, and returns the output, or
    a dict of all. parameters: also as `tokens` or, with a default, `top_k=50`. Others: see
    flexq_bench.workloads.operation.Operation. Raises WorkloadError for an invalid definition,
    ShapeError for an unknown number.
    """

    for number in {tensor.number for part in (inputs, outputs) for tensor in part}:
        if number not in (*DTYPES, *FORMATS):
            NumberFormat.parse(number)
    for tensor in inputs:
        is_drawn = draw is not None or tensor.distribution.startswith((BELOW, "ones"))
        if tensor.number in INTEGERS and not is_drawn:
            raise WorkloadError(
                f"{name}: {tensor.name} is {tensor.number}: its distribution is `below EXPRESSION` "
                "(below 2 for bool), or `draw` returns it"
            )

    def declare_by(reference: Function) -> Operation:
        doc = (reference.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        return declare(
            Operation(
                name,
                summary or doc or "an operation of its own",
                tuple(_parameter(p) for p in parameters),
                tuple(inputs),
                tuple(outputs),
                bytes,
                operations,
                reference=reference,
                draw=draw,
                accepts=accepts,
            )
        )

    return declare_by


def _parameter(declared: Parameter | str) -> Parameter:
    if isinstance(declared, Parameter):
        return declared
    name, equals, default = declared.partition("=")
    if equals and not default.isdecimal():
        raise WorkloadError(
            f"{declared}: a default is a whole number, as percent=90: give words as "
            f"Parameter({name!r}, …, choices=(…))"
        )
    value = int(default) if equals else None
    least = 2 if name == GPUS else 1
    return Parameter(name, "", minimum=least, default=value, is_axis=value is None)
