"""Public interface for kernels from outside of this repository, stable across versions.

    from flexq_bench.api import linear_kernel

    @linear_kernel("my-w6a8", weight="int6/128", activation="int8/128")
    def my_w6a8(x_codes, x_scales, w_codes, w_scales, out):
        ...

`API_VERSION` increases when the meaning of an existing name changes, but not with additions.
Documentation: docs/bring-your-own.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexq_bench.kernels.contract import (
    Backend,
    Capability,
    Config,
    KernelSpec,
    LinearKernel,
    PackedOperand,
    Packing,
    check_gemm,
    checked_scales,
)
from flexq_bench.kernels.errors import KernelError, ShapeError, UnsupportedError
from flexq_bench.kernels.external.function_kernel import (
    BACKENDS,
    Configurations,
    DefinitionError,
    Function,
    FunctionDefinition,
    Tensors,
)
from flexq_bench.kernels.formats import FP16, NumberFormat, Operand, quantize
from flexq_bench.kernels.reference import Reference, reference_gemm
from flexq_bench.kernels.runtime.nvrtc import compile_cuda
from flexq_bench.workloads.gemm import GemmWorkload

API_VERSION = 1

__all__ = [
    "API_VERSION",
    "FP16",
    "Backend",
    "Capability",
    "Config",
    "DefinitionError",
    "FunctionDefinition",
    "GemmWorkload",
    "KernelError",
    "KernelSpec",
    "LinearKernel",
    "NumberFormat",
    "Operand",
    "PackedOperand",
    "Packing",
    "Reference",
    "ShapeError",
    "UnsupportedError",
    "check_gemm",
    "checked_scales",
    "compile_cuda",
    "linear_kernel",
    "quantize",
    "reference_gemm",
]


def linear_kernel(
    name: str,
    *,
    weight: str,
    activation: str = "fp16",
    variant: str = "",
    backends: Sequence[Backend] = BACKENDS,
    prepare_weight: Callable[..., Tensors] | None = None,
    quantize_activation: Callable[..., object] | None = None,
    configurations: Configurations = (),
    min_capability: Capability = (8, 0),
    rounds_to: int | None = None,
    summary: str = "",
    machine_code: Callable[[str], bytes] | None = None,
) -> Callable[[Function], FunctionDefinition]:
    """Declare a function to be a kernel, Y[M,N] = X[M,K] · W[N,K]^T.

    weight, activation: number formats, for example `int6/128` (6-bit integers, an FP16 scale for
    every 128 values of k), `int8/row` (one scale per row), `uint4/128` (with zero points; only for
    weights, with `fp16` activations), `fp8/row` (E4M3) or `fp16` (dense). The function is called as

        function(x_codes, x_scales, w_codes, w_scales, out)      both quantized
        function(x, w_codes, w_scales, out)                      activation="fp16"
        function(x, w_codes, w_scales, w_zero_points, out)       weight="uint4/128"

    with x_codes int8 [M,K], w_codes int8 [N,K] (or E4M3), scales FP16 [rows, ceil(K / group)], zero
    points int8 (int16 for 8 bits), which are added to codes, x FP16 [M,K], and out FP16 [M,N]. All
    are contiguous and on one device. The function writes to out and returns nothing. All launches
    must go to torch's current stream. The function is captured in a CUDA graph, so it must not
    synchronize with the device.

    backends: on which the function runs. prepare_weight(w_codes, w_scales): called once, not
    timed; the tensor or tensors that it returns replace w_codes and w_scales.
    quantize_activation(x, x_codes, x_scales): writes the codes and scales of FP16 x in the
    activation's format; with it, or with activation="fp16", the kernel also has the stage
    `linear`. configurations: keyword arguments of the function to choose from by timing, or a
    function that maps a GemmWorkload to them; the first is the default. min_capability: of a GPU.
    rounds_to: see KernelSpec. machine_code(target): returns the cubin for an architecture, for
    example "sm_90", which `gate static` compares; `compile_cuda` compiles one from CUDA C++.
    summary: one line; default: the first line of the docstring. name, variant: lower-case letters,
    digits, dots and hyphens; the name is prefixed with the package or the file's stem.

    Raises ShapeError for an unknown format, DefinitionError for one that functions don't support.
    """

    def declare(function: Function) -> FunctionDefinition:
        return FunctionDefinition(
            function,
            name,
            NumberFormat.parse(weight),
            NumberFormat.parse(activation),
            variant,
            tuple(backends),
            prepare_weight,
            quantize_activation,
            configurations,
            min_capability,
            rounds_to,
            summary,
            machine_code,
        )

    return declare
