"""Number formats: symmetric group quantization and bit planes."""

from kernels.formats.operand import Operand
from kernels.formats.symmetric import quantize_symmetric

__all__ = ["Operand", "quantize_symmetric"]
