"""Public interface for kernels from outside of this repository, stable across versions.

    from flexq_bench.api import linear_kernel

    @linear_kernel("my-w6a8", weight="int6/128", activation="int8/128")
    def my_w6a8(x_codes, x_scales, w_codes, w_scales, out):
        ...

`API_VERSION` increases when the meaning of an existing name changes, but not with additions.
Documentation: docs/bring-your-own.md.
"""

from __future__ import annotations

from flexq_bench.kernels.contract import (
    Backend,
    Capability,
    Config,
    KernelSpec,
    LinearKernel,
    OperationKernel,
    PackedOperand,
    Packing,
    check_gemm,
    checked_scales,
)
from flexq_bench.kernels.errors import KernelError, ShapeError, UnsupportedError
from flexq_bench.kernels.external.declaration import DefinitionError
from flexq_bench.kernels.external.declare import kernel, linear_kernel, operation
from flexq_bench.kernels.external.function_kernel import FunctionDefinition
from flexq_bench.kernels.formats import FP16, NumberFormat, Operand, quantize
from flexq_bench.kernels.reference import Reference, reference_gemm
from flexq_bench.kernels.runtime.nvrtc import compile_cuda
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import (
    Input,
    Operation,
    OperationWorkload,
    Output,
    Parameter,
)

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
    "Input",
    "KernelError",
    "KernelSpec",
    "LinearKernel",
    "NumberFormat",
    "Operand",
    "Operation",
    "OperationKernel",
    "OperationWorkload",
    "Output",
    "PackedOperand",
    "Packing",
    "Parameter",
    "Reference",
    "ShapeError",
    "UnsupportedError",
    "check_gemm",
    "checked_scales",
    "compile_cuda",
    "kernel",
    "linear_kernel",
    "operation",
    "quantize",
    "reference_gemm",
]
