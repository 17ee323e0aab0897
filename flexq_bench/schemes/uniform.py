"""Rounding to nearest with one format for all weights and one for all activations.

`w6a6`, `w4a16`: groups of 128 along K for both, as FlexQ has them (arXiv:2508.04405, section 3.1).
`w8a16`, as its kernel has it, and `rtn-w6a6`: a scale per output channel and per token, as the
papers' RTN rows and ABQ-LLM's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from flexq_bench.schemes.activations import DynamicActivation
from flexq_bench.schemes.fake_quantization import quantize_site
from flexq_bench.schemes.model_map import LinearSite, weight_of
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions
from kernels.formats import FP16, NumberFormat, quantize

FLEXQ_GROUP = 128
FULL_BITS = 16  # of an operand that is not quantized


@dataclass(frozen=True, slots=True)
class UniformOptions(SchemeOptions):
    """Bits of weights and activations; 16: not quantized. group: along K; None: a scale a row."""

    w_bits: int
    a_bits: int
    group: int | None = FLEXQ_GROUP


class Uniform(Scheme):
    """Symmetric integers, rounded to nearest, the same everywhere."""

    version = 2  # 2: w8a16 has a scale a row; weights that are not quantized are FP16
    source = "FlexQ, arXiv:2508.04405, section 3.1"
    options: UniformOptions

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        options = self.options
        for site in state.layout.of_block(block):
            round_site(state.model, site, options.w_bits, options.a_bits, options.group)


def round_site(
    model: nn.Module, site: LinearSite, w_bits: int, a_bits: int, group: int | None
) -> None:
    """Quantize one site to symmetric integers, rounded to nearest."""
    number = NumberFormat(w_bits, group) if w_bits < FULL_BITS else FP16
    weight = quantize(weight_of(model, site), number)
    activation = DynamicActivation(NumberFormat(a_bits, group)) if a_bits < FULL_BITS else None
    quantize_site(model, site, weight, activation)
