"""Number formats, operands, and quantization of matrices to codes and scales.

Integers in groups (`symmetric_quantization` is FlexQ's formula, `asymmetric` has zero points),
dual-grained and mixed formats, scaled FP8, minifloats, and bit planes.
"""

from flexq_bench.kernels.formats.asymmetric import quantize_asymmetric
from flexq_bench.kernels.formats.dual_grained import quantize_dual_grained
from flexq_bench.kernels.formats.fp8 import quantize_e4m3
from flexq_bench.kernels.formats.minifloat import quantize_minifloat
from flexq_bench.kernels.formats.mixed import quantize_mixed
from flexq_bench.kernels.formats.number_format import (
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
    "FP16",
    "ColumnGroup",
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
    "quantize_e4m3",
    "quantize_minifloat",
    "quantize_mixed",
    "quantize_symmetric",
]
