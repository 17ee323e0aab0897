"""Floating-point element types of 4 to 8 bits: the number of every code, and rounding to them.

A code is a sign, exponent and mantissa, from the top bit down, with the exponent bias
2^(exponent bits - 1) - 1 and with subnormals. Sources: OCP Microscaling Formats (MX) specification
1.0, section 5.3 (E2M1, E2M3, E3M2), OCP 8-bit floating point specification 1.0, table 1 (E4M3,
E5M2), ZeroQuant(4+2) (arXiv 2312.08583, section 4; E3M1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class FloatType:
    """A type's bits, and how many of its highest codes are infinity or NaN.

    dtype: in which an Operand stores numbers.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    special_codes: int = 0
    dtype: torch.dtype = torch.float16

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest number: floor(log2(largest))."""
        top_code = (1 << (self.bits - 1)) - 1 - self.special_codes
        return (top_code >> self.mantissa_bits) - self.bias

    @cached_property
    def largest(self) -> float:
        return float(self._magnitudes()[-1 - self.special_codes])

    def numbers(self) -> torch.Tensor:
        """Return the number of every code, float64 [2^bits]; NaN for NaN and infinity."""
        magnitudes = self._magnitudes()
        if self.special_codes:
            magnitudes[-self.special_codes :] = torch.nan
        return torch.cat([magnitudes, -magnitudes])

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        """Round to the nearest numbers, float64: ties to the even code, saturated."""
        _, exponent = torch.frexp(values)  # the mantissa is in [0.5, 1)
        step = torch.exp2((exponent - 1).clamp(min=1 - self.bias).double() - self.mantissa_bits)
        return ((values / step).round() * step).clamp(-self.largest, self.largest)

    def codes(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the code of each number, int64. Other values give codes of other numbers."""
        finite = self._magnitudes()[: (1 << (self.bits - 1)) - self.special_codes]
        magnitude = torch.searchsorted(
            finite.to(numbers.device), numbers.double().abs().contiguous()
        )
        return magnitude | torch.signbit(numbers.double()).long() << (self.bits - 1)

    def _magnitudes(self) -> torch.Tensor:
        """The number of every code without a sign, as if none were infinity or NaN."""
        code = torch.arange(1 << (self.bits - 1), device="cpu")
        mantissa = (code & ((1 << self.mantissa_bits) - 1)).double() / (1 << self.mantissa_bits)
        exponent = code >> self.mantissa_bits
        power = torch.exp2((exponent.clamp(min=1) - self.bias).double())
        return ((exponent > 0).double() + mantissa) * power


FLOAT_TYPES = {
    kind.name: kind
    for kind in (
        FloatType("e2m1", 2, 1),
        FloatType("e3m1", 3, 1),
        FloatType("e3m2", 3, 2),
        FloatType("e2m3", 2, 3),
        FloatType("e4m3", 4, 3, special_codes=1, dtype=torch.float8_e4m3fn),
        FloatType("e5m2", 5, 2, special_codes=4, dtype=torch.float8_e5m2),
    )
}
# The type that `fp4`, `fp5`, `fp6` and `fp8` name without another one.
USUAL_TYPES = {4: "e2m1", 5: "e3m1", 6: "e3m2", 8: "e4m3"}
E4M3 = FLOAT_TYPES["e4m3"]
