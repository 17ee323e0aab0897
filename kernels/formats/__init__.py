"""Number formats: symmetric and asymmetric groups, small floats, scaled FP8 and bit planes."""

from kernels.formats.fp8 import quantize_e4m3
from kernels.formats.number import NumberFormat, Scaling
from kernels.formats.operand import Operand
from kernels.formats.symmetric import quantize_symmetric

__all__ = [
    "NumberFormat",
    "Operand",
    "Scaling",
    "quantize_e4m3",
    "quantize_symmetric",
]
