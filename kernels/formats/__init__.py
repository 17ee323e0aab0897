"""Number formats: symmetric group quantization, scaled FP8 and minifloats, bit planes."""

from kernels.formats.fp8 import quantize_e4m3
from kernels.formats.minifloat import quantize_minifloat
from kernels.formats.operand import Operand
from kernels.formats.symmetric import quantize_symmetric

__all__ = ["Operand", "quantize_e4m3", "quantize_minifloat", "quantize_symmetric"]
