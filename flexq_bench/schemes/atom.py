"""Atom, W4A4: outlier channels in 8 bits at the end of each row, the others in groups of 4 bits.

Zhao et al., arXiv 2310.19102: channels sorted by the square sum of the calibration inputs, the
last ones kept in 8 bits (section 4.1), groups of 128 (section 4.2), ranges clipped to 0.9 of an
activation's and 0.85 of a weight's (section 4.4: the best of a grid search), GPTQ (section 4.4),
keys and values in 4 bits a head (section 4.3). Each of these is a switch, so that the steps of the
paper's Table 4 can be measured one by one.

The paper keeps 128 channels; here they are the last group of K (`kernels.formats.mixed`), fewer
where K is no multiple of 128, so that every K has a kernel. Without groups, or with outliers in
FP16, as in the first steps of Table 4, they are the paper's last 128 channels, without a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flexq_bench.kernels.formats import FP16, NumberFormat, Operand, quantize
from flexq_bench.kernels.formats.mixed import ACTIVATION_CLIP, GROUP, TAIL_BITS
from flexq_bench.schemes.activations import (
    ActivationQuantizer,
    DynamicActivation,
    SplitActivation,
)
from flexq_bench.schemes.calibration import Statistics
from flexq_bench.schemes.fake_quantization import quantize_site
from flexq_bench.schemes.gptq import gptq_together
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.model_map import weight_of
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions
from flexq_bench.schemes.site_inputs import observe_block, readers_of


@dataclass(frozen=True, slots=True)
class AtomOptions(SchemeOptions):
    """Each step of Table 4 of arXiv 2310.19102.

    outliers: the last group of channels has 8 bits, or outlier_bits: 8, or 16 for FP16.
    reorder:  sort channels, the largest ones last; without outliers, channels are never reordered.
    group:    values of k that share a scale; None: one scale per output channel and per token.
    activation_clip, weight_clip: share of the range that the codes of the other groups span; 1: all
              of it.
    gptq:     quantize with GPTQ instead of rounding to nearest.
    kv_bits:  of keys and values, with one scale per head and token; 16: not quantized.
    """

    w_bits: int = 4
    a_bits: int = 4
    outliers: bool = True
    outlier_bits: int = TAIL_BITS
    reorder: bool = True
    group: int | None = 128
    activation_clip: float = ACTIVATION_CLIP
    weight_clip: float = 0.85
    gptq: bool = True
    kv_bits: int = field(default=4, kw_only=True)

    def __post_init__(self) -> None:
        if self.outlier_bits not in (TAIL_BITS, FP16.bits):
            raise ValueError(f"outliers have 8 or 16 bits, got {self.outlier_bits}")
        if self.is_split and self.gptq:
            raise ValueError(
                "GPTQ solves groups whose last one has 8 bits: give gptq=false, or a group and "
                "outlier_bits=8"
            )
        self.weight, self.activation  # noqa: B018 - they say what is wrong with bits and clips

    @property
    def is_split(self) -> bool:
        """True if the outliers are not a group of the same operand."""
        return self.outliers and (self.group is None or self.outlier_bits == FP16.bits)

    @property
    def weight(self) -> NumberFormat:
        return self._number(self.w_bits, self.weight_clip)

    @property
    def activation(self) -> NumberFormat:
        return self._number(self.a_bits, self.activation_clip)

    def _number(self, bits: int, clip: float) -> NumberFormat:
        is_mixed = self.outliers and not self.is_split
        return NumberFormat(bits, self.group, "mixed" if is_mixed else "symmetric", clip)

    @property
    def tail(self) -> NumberFormat | None:
        """Format of outliers that are split from the others; None: FP16."""
        return None if self.outlier_bits == FP16.bits else NumberFormat(TAIL_BITS, self.group)


class Atom(Scheme):
    """Mixed 4 and 8 bits with reordered channels."""

    version = 2  # 2: outliers are the last group of K; keys are rounded after the rotary embedding
    source = "Atom, arXiv:2310.19102, sections 4.1 to 4.4"
    options: AtomOptions
    needs_calibration = True

    def layer_formats(self, kind: str, gated: bool) -> LayerFormats:
        if self.options.is_split:
            return LayerFormats(FP16, None)  # of the rounded values
        return super().layer_formats(kind, gated)

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        options = self.options
        statistics = Statistics(hessian=options.gptq)
        observe_block(state, block, statistics)
        for site_input in state.layout.inputs_of(block):
            readers = readers_of(state, block, site_input)
            first = readers[0].name
            order = None
            if options.outliers and options.reorder:
                order = torch.argsort(statistics.square_sum[first], stable=True)
            weights = [weight_of(state.model, site) for site in readers]
            if options.gptq:
                solved = gptq_together(
                    weights, statistics.hessian[first], options.weight, order=order
                )
            elif options.is_split:
                solved = [_split(weight, options, order) for weight in weights]
            else:
                solved = [quantize(weight, options.weight, order=order) for weight in weights]
            activation: ActivationQuantizer = DynamicActivation(options.activation)
            if options.is_split:
                start = _first_outlier(weights[0].shape[1])
                activation = SplitActivation(options.activation, options.tail, start)
            for site, rounded in zip(readers, solved, strict=True):
                quantize_site(state.model, site, rounded, activation)


def _first_outlier(k: int) -> int:
    return max(0, k - GROUP)


def _split(weight: torch.Tensor, options: AtomOptions, order: torch.Tensor | None) -> Operand:
    """Round weights [N, K] and their last channels in two formats; the values are FP16."""
    k = weight.shape[1]
    order = torch.arange(k, device=weight.device) if order is None else order
    ordered, start = weight[:, order], _first_outlier(k)
    parts = [
        quantize(part, number).dequantize(torch.float16) if number is not None else part.half()
        for part, number in (
            (ordered[:, :start], options.weight),
            (ordered[:, start:], options.tail),
        )
        if part.shape[1]
    ]
    return Operand(torch.cat(parts, dim=1), None, FP16.bits, None, order=order.to(torch.int32))
