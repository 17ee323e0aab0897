"""Floats of 5 and 6 bits: E3M1 and E3M2 of ZeroQuant(4+2) (arXiv:2312.08583) and FP6-LLM.

Sign, three exponent bits with bias 3, one or two mantissa bits; subnormals, no infinity, no NaN
(as E3M2 is in the OCP Microscaling formats specification 1.0, section 5.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_EXPONENT_BITS = 3
_BIAS = 3


@dataclass(frozen=True, slots=True)
class MiniFloat:
    """A float with three exponent bits and this many mantissa bits."""

    mantissa_bits: int

    @property
    def bits(self) -> int:
        return 1 + _EXPONENT_BITS + self.mantissa_bits

    @property
    def largest(self) -> float:
        """28 for E3M2, 24 for E3M1."""
        top_exponent = 2**_EXPONENT_BITS - 1 - _BIAS
        return float(2**top_exponent * (2 - 2.0**-self.mantissa_bits))


KINDS = {"e3m2": MiniFloat(2), "e3m1": MiniFloat(1)}


def encode(values: torch.Tensor, number: MiniFloat) -> torch.Tensor:
    """Codes of scaled values: round half to even, saturate; whole numbers in the same dtype."""
    mantissa = number.mantissa_bits
    magnitude = values.abs().clamp_max(number.largest)
    # frexp's exponent is one above the usual: x = m · 2^e with m in [0.5, 1).
    exponent = (torch.frexp(magnitude)[1] - 1).clamp_min(1 - _BIAS)
    step = torch.ldexp(torch.ones_like(magnitude), exponent - mantissa)
    rounded = torch.round(magnitude / step)
    # A mantissa that rounds up to 2 carries into the exponent by itself: codes are consecutive.
    codes = rounded + (exponent - (1 - _BIAS)).to(values.dtype) * 2**mantissa
    codes += torch.signbit(values).to(values.dtype) * 2 ** (number.bits - 1)
    # frexp gives zero an exponent that is not the smallest; and there is one zero, without a sign.
    coded: torch.Tensor = torch.where(rounded > 0, codes, 0.0)
    return coded


def decode(codes: torch.Tensor, number: MiniFloat) -> torch.Tensor:
    """The numbers that codes stand for, in the dtype of the codes, exact."""
    mantissa, sign_bit = number.mantissa_bits, number.bits - 1
    whole = codes.to(torch.int32)
    fields = whole & ((1 << sign_bit) - 1)
    exponent = (fields >> mantissa).clamp_min(1)
    # The leading one is implied but in subnormals, whose exponent field is zero.
    implied = torch.where(fields >> mantissa > 0, 1 << mantissa, 0)
    significand = (fields & ((1 << mantissa) - 1)) + implied
    magnitude: torch.Tensor = torch.ldexp(significand.to(codes.dtype), exponent - _BIAS - mantissa)
    return torch.where(whole >> sign_bit > 0, -magnitude, magnitude)
