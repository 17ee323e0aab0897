"""Number formats and operands: what a format is called, and how values become codes and scales.

Groups of integers (`symmetric_quantization` is FlexQ's formula), dual-grained and mixed ones,
scaled FP8, minifloats, and bit planes.
"""

from kernels.formats.dual_grained import quantize_dual_grained
from kernels.formats.fp8 import quantize_e4m3
from kernels.formats.minifloat import quantize_minifloat
from kernels.formats.mixed import quantize_mixed
from kernels.formats.number_format import FP16, Kind, NumberFormat, Scaling
from kernels.formats.operand import Operand
from kernels.formats.quantization import format_of, quantize
from kernels.formats.symmetric_quantization import quantize_symmetric

__all__ = [
    "FP16",
    "Kind",
    "NumberFormat",
    "Operand",
    "Scaling",
    "format_of",
    "quantize",
    "quantize_dual_grained",
    "quantize_e4m3",
    "quantize_minifloat",
    "quantize_mixed",
    "quantize_symmetric",
]
