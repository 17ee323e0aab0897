"""SmoothQuant: difficulty is moved from activations to weights by a fixed formula.

Xiao et al., arXiv 2211.10438: s = max|X|^alpha / max|W|^(1 - alpha) (equation 4), alpha 0.5 by
default and otherwise from a grid (section 4); weights and activations then rounded to nearest.
Every input is smoothed, including those of o_proj and down_proj, which the paper leaves out: in GLU
models down_proj's input is the most difficult one (arXiv 2508.04405, section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes.calibration import InputSamples, Statistics
from flexq_bench.schemes.channels import SiteInput
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.model_map import LinearSite, weight_of
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions
from flexq_bench.schemes.site_inputs import (
    fold_scale,
    largest_magnitudes,
    observe_block,
    readers_of,
)
from flexq_bench.schemes.smoothing import check_share, smoothquant_scale, spread, unrounded
from flexq_bench.schemes.uniform import round_site

ALPHAS = tuple(i / 20 for i in range(6, 19))  # 0.3 … 0.9


@dataclass(frozen=True, slots=True)
class SmoothQuantOptions(SchemeOptions):
    """Options of SmoothQuant.

    alpha:   of all inputs; None: for each input the one of ALPHAS with the least output error.
    group:   values of k that share a scale; None, as in the papers' tables: one scale per output
             channel and per token.
    samples: number of tokens on which alphas are compared.
    """

    w_bits: int
    a_bits: int
    alpha: float | None = 0.5
    group: int | None = None
    samples: int = 512

    def __post_init__(self) -> None:
        if self.alpha is not None:
            check_share("alpha", self.alpha)
        if self.samples < 1:
            raise ValueError(f"alphas are compared on at least 1 token, got {self.samples}")


class SmoothQuant(Scheme):
    """Smoothed, then symmetric integers rounded to nearest."""

    source = "SmoothQuant, arXiv:2211.10438, section 4"
    options: SmoothQuantOptions
    needs_calibration = True

    def layer_formats(self, kind: str, gated: bool) -> LayerFormats:
        options = self.options
        return LayerFormats(
            NumberFormat(options.w_bits, options.group), NumberFormat(options.a_bits, options.group)
        )

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        options = self.options
        statistics, samples = Statistics(), InputSamples(options.samples)
        observe_block(state, block, statistics)
        if options.alpha is None:
            state.inputs.observe(samples)
        with unrounded(state.layout.block_module(state.model, block)):
            for site_input in state.layout.scalable_inputs(block):
                self._smooth(state, block, site_input, statistics, samples)
            for site in state.layout.of_block(block):
                round_site(state.model, site, options.w_bits, options.a_bits, options.group)

    def _smooth(
        self,
        state: QuantizationState,
        block: int,
        site_input: SiteInput,
        statistics: Statistics,
        samples: InputSamples,
    ) -> None:
        readers, alpha = readers_of(state, block, site_input), self.options.alpha
        if alpha is None:
            if not len(samples.of(readers[0])):
                return
            largest = largest_magnitudes(state, block, site_input, statistics)
            alpha = self._best_alpha(state, site_input, readers, largest, samples)
        smooth_input(state, block, site_input, statistics, alpha)

    def _best_alpha(
        self,
        state: QuantizationState,
        site_input: SiteInput,
        readers: list[LinearSite],
        largest: tuple[torch.Tensor, torch.Tensor],
        samples: InputSamples,
    ) -> float:
        options = self.options
        weight_format = NumberFormat(options.w_bits, options.group)
        input_format = NumberFormat(options.a_bits, options.group)
        x = samples.of(readers[0]).float()
        errors = []
        for alpha in ALPHAS:
            divisor = spread(smoothquant_scale(*largest, alpha), site_input)
            rounded_inputs = input_format.round(x / divisor)
            error = 0.0
            for reader in readers:
                weight = weight_of(state.model, reader).float()
                rounded = weight_format.round(weight * divisor)
                error += float((rounded_inputs @ rounded.T - x @ weight.T).square().sum())
            errors.append(error)
        return ALPHAS[errors.index(min(errors))]


def smooth_input(
    state: QuantizationState,
    block: int,
    site_input: SiteInput,
    statistics: Statistics,
    alpha: float,
) -> dict[str, torch.Tensor]:
    """Fold the scale of this alpha into the block; returns the result of fold_scale."""
    largest = largest_magnitudes(state, block, site_input, statistics)
    return fold_scale(state, block, site_input, smoothquant_scale(*largest, alpha))
