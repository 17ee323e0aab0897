"""Number formats, operands, and quantization of matrices to codes and scales.

Integers in groups (`symmetric_quantization` is FlexQ's formula, `asymmetric` has zero points),
dual-grained and mixed formats, floats of 4 to 8 bits with scales of rows, groups, blocks or
matrices (MX and NVFP4 among them), and bit planes.
"""

from flexq_bench.kernels.formats.asymmetric import quantize_asymmetric
from flexq_bench.kernels.formats.dual_grained import quantize_dual_grained
from flexq_bench.kernels.formats.floats import FLOAT_TYPES, FloatType
from flexq_bench.kernels.formats.mixed import quantize_mixed
from flexq_bench.kernels.formats.number_format import (
    DENSE_TYPES,
    FP16,
    ColumnGroup,
    Kind,
    NumberFormat,
    Rounder,
    Scaling,
)
from flexq_bench.kernels.formats.operand import Operand
from flexq_bench.kernels.formats.quantization import assembled, format_of, quantize
from flexq_bench.kernels.formats.symmetric_quantization import quantize_symmetric

__all__ = [
    "DENSE_TYPES",
    "FLOAT_TYPES",
    "FP16",
    "ColumnGroup",
    "FloatType",
    "Kind",
    "NumberFormat",
    "Operand",
    "Rounder",
    "Scaling",
    "assembled",
    "format_of",
    "quantize",
    "quantize_asymmetric",
    "quantize_dual_grained",
    "quantize_mixed",
    "quantize_symmetric",
]
