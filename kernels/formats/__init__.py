"""Number formats: groups of integers, dual-grained ones, scaled FP8, minifloats, bit planes."""

from kernels.formats.dual_grained import quantize_dual_grained
from kernels.formats.fp8 import quantize_e4m3
from kernels.formats.minifloat import quantize_minifloat
from kernels.formats.mixed import quantize_mixed
from kernels.formats.number import NumberFormat, Scaling
from kernels.formats.operand import Operand
from kernels.formats.symmetric import quantize_symmetric

__all__ = [
    "NumberFormat",
    "Operand",
    "Scaling",
    "quantize_dual_grained",
    "quantize_e4m3",
    "quantize_minifloat",
    "quantize_mixed",
    "quantize_symmetric",
]
