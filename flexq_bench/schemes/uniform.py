"""Rounding to nearest with one format for all weights and one for all activations.

`w6a6`, `w4a16`: groups of 128 along K for both, as FlexQ has them (arXiv:2508.04405, section 3.1).
`w8a16`, as its kernel has it, and `rtn-w6a6`: a scale per output channel and per token, as the
papers' RTN rows and ABQ-LLM's kernels. `fp16` is the unquantized model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from flexq_bench.kernels.formats import FP16, NumberFormat, quantize
from flexq_bench.schemes.activations import dynamic
from flexq_bench.schemes.fake_quantization import quantize_site
from flexq_bench.schemes.model_map import LinearSite, weight_of
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions

FLEXQ_GROUP = 128
FULL_BITS = 16  # bits of an operand that is not quantized


@dataclass(frozen=True, slots=True)
class UniformOptions(SchemeOptions):
    """Bits of weights and activations; 16: not quantized. group: along K; None: a scale per row.

    per_token: one scale per token for activations, whatever the group of the weights, as in DGQ's
    comparisons (arXiv:2310.04836).
    """

    w_bits: int
    a_bits: int
    group: int | None = FLEXQ_GROUP
    per_token: bool = False

    @property
    def weight(self) -> NumberFormat:
        return uniform_format(self.w_bits, self.group)

    @property
    def activation(self) -> NumberFormat:
        return uniform_format(self.a_bits, None if self.per_token else self.group)


class Dense(Scheme):
    """Nothing is quantized: the baseline of every comparison."""

    source = "the baseline of every comparison"

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        """Leave every site unchanged."""


class Uniform(Scheme):
    """Symmetric integers, rounded to nearest, in the same format for all layers."""

    version = 2  # 2: w8a16 has a scale a row; weights that are not quantized are FP16
    source = "FlexQ, arXiv:2508.04405, section 3.1"
    options: UniformOptions

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        for site in state.layout.of_block(block):
            round_to(state.model, site, self.options.weight, self.options.activation)


def uniform_format(bits: int, group: int | None) -> NumberFormat:
    """Symmetric integers of these bits; FULL_BITS: not quantized."""
    return NumberFormat(bits, group) if bits < FULL_BITS else FP16


def round_site(
    model: nn.Module, site: LinearSite, w_bits: int, a_bits: int, group: int | None
) -> None:
    """Quantize one site to symmetric integers, rounded to nearest."""
    round_to(model, site, uniform_format(w_bits, group), uniform_format(a_bits, group))


def round_to(
    model: nn.Module, site: LinearSite, weight: NumberFormat, activation: NumberFormat
) -> None:
    """Round one site to nearest in these formats; dense activations stay as they are."""
    rounded = quantize(weight_of(model, site), weight)
    quantize_site(model, site, rounded, dynamic(activation))
