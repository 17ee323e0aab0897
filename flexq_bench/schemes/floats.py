"""Floating-point weights, and activations, rounded to nearest or by GPTQ.

- ZeroQuant(4+2) (Wu et al., arXiv 2312.08583): FP6 is E3M2 and FP5 is E3M1, without infinities
  (section 4); coarse grain is one scale an output channel, fine grain a scale a group (section 3).
- FP8 of channels and tokens, and of blocks of 128 x 128 weights (DeepSeek-V3 technical report,
  arXiv 2412.19437, section 3.3.2).
- MXFP4, MXFP6 and MXFP8 (OCP Microscaling Formats specification 1.0), NVFP4 (NVIDIA,
  arXiv 2509.25149).
"""

from __future__ import annotations

from dataclasses import dataclass

from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.schemes.activations import dynamic
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


@dataclass(frozen=True, slots=True)
class FloatOptions(SchemeOptions):
    """Names of number formats. gptq: errors of rounding are compensated; or RTN.

    Activations whose scale depends on several rows, as NVFP4's, are scaled over the tokens of a
    forward pass. Raises ValueError for an unknown name, and for GPTQ with scales of several rows.
    """

    weight_format: str
    activation_format: str
    gptq: bool = False

    def __post_init__(self) -> None:
        try:
            shares_rows = self.weight.shares_rows
            NumberFormat.parse(self.activation_format)
        except ShapeError as error:
            raise ValueError(str(error)) from error
        if self.gptq and shares_rows:
            raise ValueError(f"GPTQ needs scales of each row, which {self.weight_format} has not")

    @property
    def weight(self) -> NumberFormat:
        return NumberFormat.parse(self.weight_format)

    @property
    def activation(self) -> NumberFormat:
        return NumberFormat.parse(self.activation_format)


class Floats(Scheme):
    """Weights, and with FloatOptions activations, as floats."""

    source = (
        "ZeroQuant(4+2), arXiv:2312.08583; OCP Microscaling Formats 1.0; NVFP4, arXiv:2509.25149"
    )
    options: SmallFloatOptions | FloatOptions

    @property
    def needs_calibration(self) -> bool:
        return self.options.gptq

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        options, number = self.options, self.options.weight
        activation = dynamic(options.activation)
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
                quantize_site(state.model, site, rounded, activation)
