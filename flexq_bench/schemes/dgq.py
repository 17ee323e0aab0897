"""DGQ, W4A8: dual-grained weights, and outlier channels clipped into the weights.

Zhang et al., arXiv 2310.04836: section 3.2 is `kernels.formats.dual_grained`, section 3.3 is
`dual_grained`, section 3.4 the percentile clipping smoothing, with dynamic scales of each token or
one static scale of the layer (section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.kernels.formats import NumberFormat, Operand, quantize
from flexq_bench.kernels.formats.dual_grained import CODE_BITS, LARGEST_INT8
from flexq_bench.schemes.activations import DynamicActivation, StaticActivation, of_all_tokens
from flexq_bench.schemes.calibration import Statistics
from flexq_bench.schemes.dual_grained import SearchOptions, search_dual_grained, search_groups
from flexq_bench.schemes.fake_quantization import quantize_site
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.model_map import weight_of
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions
from flexq_bench.schemes.site_inputs import fold_scale, observe_block, readers_of
from flexq_bench.schemes.smoothing import gather, percentile_scale, unrounded

_GRAINS = ("dual", "group", "channel")


@dataclass(frozen=True, slots=True)
class DgqOptions(SchemeOptions):
    """Options of DGQ.

    search:   use the two-phase search; else round to nearest on both levels.
    group_steps, row_steps: steps of the grids of the two phases.
    outliers: share of an input's channels that are clipped; 0: no smoothing.
    static:   one scale per layer, from calibration; else a scale per token.
    weights:  `dual`, or real scales of each `group` or `channel` (Table 5), without a kernel.
    """

    group: int = 128
    search: bool = True
    group_steps: int = 20
    row_steps: int = 80
    outliers: float = 0.005
    static: bool = False
    weights: str = "dual"

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"a group needs at least one value, got {self.group}")
        if self.weights not in _GRAINS:
            raise ValueError(f"weights are {', '.join(_GRAINS)}, got {self.weights!r}")
        if not 0 <= self.outliers < 1 or self.group_steps < 2 or self.row_steps < 2:
            raise ValueError(
                "outliers is a share below 1 and a grid has at least 2 steps, got "
                f"{self.outliers}, {self.group_steps} and {self.row_steps}"
            )

    @property
    def weight(self) -> NumberFormat:
        if self.weights == "dual":
            return NumberFormat(CODE_BITS, self.group, "dual")
        group = self.group if self.weights == "group" else None
        return NumberFormat(CODE_BITS, group, "asymmetric")


class Dgq(Scheme):
    """4-bit weights that are expanded to INT8 with one scale per row, and INT8 activations."""

    version = 2  # 2: without the search, weights are rounded as by the kernels' packing
    source = "DGQ, arXiv:2310.04836, sections 3.2 to 3.4"
    options: DgqOptions
    needs_calibration = True

    def layer_formats(self, kind: str, gated: bool) -> LayerFormats:
        int8 = NumberFormat(8)
        return LayerFormats(
            self.options.weight, of_all_tokens(int8) if self.options.static else int8
        )

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        statistics = Statistics(hessian=True)
        observe_block(state, block, statistics)
        with unrounded(state.layout.block_module(state.model, block)):
            divisors = self._smooth(state, block, statistics)
            for site_input in state.layout.inputs_of(block):
                readers = readers_of(state, block, site_input)
                first = readers[0].name
                scale = divisors.get(first, torch.ones_like(statistics.abs_sum[first]))
                moments = statistics.hessian[first] / torch.outer(scale, scale)
                # Rows are independent, so layers with the same input are searched together.
                weights = torch.cat([weight_of(state.model, site) for site in readers])
                solved = self._rounded(weights, moments).split_rows([site.n for site in readers])
                activation = self._activation(float((statistics.absmax[first] / scale).max()))
                for site, rounded in zip(readers, solved, strict=True):
                    quantize_site(state.model, site, rounded, activation)

    def _smooth(
        self, state: QuantizationState, block: int, statistics: Statistics
    ) -> dict[str, torch.Tensor]:
        """Fold the scales into the block; returns the divisors of sites' inputs, float64 [K]."""
        divisors: dict[str, torch.Tensor] = {}
        if self.options.outliers == 0:
            return divisors
        for site_input in state.layout.scalable_inputs(block):
            readers = readers_of(state, block, site_input)
            if site_input.source.endswith("v_proj"):
                continue  # the paper smooths only the norms' outputs and the input of down_proj
            inputs = gather(statistics.absmax[readers[0].name].float(), site_input)
            scale = percentile_scale(inputs, self.options.outliers)
            divisors |= fold_scale(state, block, site_input, scale)
        return divisors

    def _rounded(self, weights: torch.Tensor, moments: torch.Tensor) -> Operand:
        options = self.options
        if not options.search:
            return quantize(weights, options.weight)
        search = SearchOptions.of_steps(options.group_steps, options.row_steps)
        if options.weights != "dual":
            return search_groups(weights, moments, options.weight.group, search)
        return search_dual_grained(weights, moments, options.group, search)

    def _activation(self, largest: float) -> DynamicActivation | StaticActivation:
        if self.options.static:
            scale = torch.tensor(largest / LARGEST_INT8, dtype=torch.float16)  # as kernels take it
            return StaticActivation(NumberFormat(8), float(scale))
        return DynamicActivation(NumberFormat(8))
