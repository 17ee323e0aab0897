"""ZeroQuant(4+2): weights of six or five bits as small floats, activations in FP16.

Wu et al., arXiv 2312.08583: FP6 is E3M2 and FP5 is E3M1, without infinities (section 4); coarse
grain is one scale an output channel, fine grain a scale a group; both rounded to nearest or by GPTQ
(section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.schemes.calibration import Statistics
from flexq_bench.schemes.fake_quantization import quantize_site
from flexq_bench.schemes.gptq import gptq_together
from flexq_bench.schemes.model_map import weight_of
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions
from flexq_bench.schemes.site_inputs import observe_block, readers_of


@dataclass(frozen=True, slots=True)
class SmallFloatOptions(SchemeOptions):
    """bits: 6 (E3M2) or 5 (E3M1). group: None, as in the paper's FP6, or fine grain. gptq: or RTN.

    Raises ValueError for other bits.
    """

    bits: int
    group: int | None = None
    gptq: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (5, 6):
            raise ValueError(f"small floats have 5 or 6 bits, got {self.bits}")

    @property
    def weight(self) -> NumberFormat:
        return NumberFormat(self.bits, self.group, "float")


class SmallFloat(Scheme):
    """FP6 or FP5 weights."""

    source = "ZeroQuant(4+2), arXiv:2312.08583, sections 3 and 4"
    options: SmallFloatOptions

    @property
    def needs_calibration(self) -> bool:
        return self.options.gptq

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        options, number = self.options, self.options.weight
        statistics = Statistics(hessian=True)
        if options.gptq:
            observe_block(state, block, statistics)
        for site_input in state.layout.inputs_of(block):
            readers = readers_of(state, block, site_input)
            weights = [weight_of(state.model, site) for site in readers]
            if options.gptq:
                solved = gptq_together(weights, statistics.hessian[readers[0].name], number)
            else:
                solved = [quantize(weight, number) for weight in weights]
            for site, rounded in zip(readers, solved, strict=True):
                quantize_site(state.model, site, rounded)
