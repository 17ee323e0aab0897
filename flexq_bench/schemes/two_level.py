"""Two-level W6A8: 6-bit weights expanded to INT8 with one scale per row, INT8 activations.

Not from a paper: the two levels and the two-phase search of DGQ (Zhang et al., arXiv 2310.04836,
sections 3.2 and 3.3) with 6 bits. The format is `kernels.formats.dual_grained`, the search
`dual_grained`. No channel is smoothed: activations are rounded as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.kernels.formats import NumberFormat, Operand, quantize
from flexq_bench.kernels.formats.dual_grained import SIX_BITS
from flexq_bench.schemes.activations import DynamicActivation
from flexq_bench.schemes.calibration import Statistics
from flexq_bench.schemes.dual_grained import search_six_bits
from flexq_bench.schemes.fake_quantization import quantize_site
from flexq_bench.schemes.model_map import weight_of
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions
from flexq_bench.schemes.site_inputs import observe_block, readers_of

_SEARCHES = ("output", "weight", "none")
_LEAST_SHARE = 0.6  # of a row's largest weight


@dataclass(frozen=True, slots=True)
class TwoLevelOptions(SchemeOptions):
    """Options of two-level W6A8.

    search: `output`: for the least error of each layer's output, which requires calibration data;
    `weight`: for the least error of its weights; `none`: rounded to nearest on both levels.
    row_steps: number of row scales tried, from all of a row's largest weight down to 0.6 of it.
    """

    group: int = 128
    search: str = "output"
    row_steps: int = 20

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"a group needs at least one value, got {self.group}")
        if self.search not in _SEARCHES or self.row_steps < 1:
            raise ValueError(
                f"search is one of {', '.join(_SEARCHES)}, with at least 1 step, got "
                f"{self.search} and {self.row_steps}"
            )

    @property
    def weight(self) -> NumberFormat:
        return NumberFormat(SIX_BITS, self.group, "dual")

    @property
    def activation(self) -> NumberFormat:
        return NumberFormat(8)


class TwoLevel(Scheme):
    """6-bit codes times a group's integer times a row's FP16 scale, and INT8 activations."""

    source = "DGQ, arXiv:2310.04836, sections 3.2 and 3.3, with 6 bits"
    options: TwoLevelOptions

    @property
    def needs_calibration(self) -> bool:
        return self.options.search == "output"

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        statistics = Statistics(hessian=True)
        if self.needs_calibration:
            observe_block(state, block, statistics)
        for site_input in state.layout.inputs_of(block):
            readers = readers_of(state, block, site_input)
            moments = statistics.hessian[readers[0].name] if self.needs_calibration else None
            # Rows are independent, so layers with the same input are searched together.
            weights = torch.cat([weight_of(state.model, site) for site in readers])
            solved = self._rounded(weights, moments).split_rows([site.n for site in readers])
            for site, rounded in zip(readers, solved, strict=True):
                quantize_site(
                    state.model, site, rounded, DynamicActivation(self.options.activation)
                )

    def _rounded(self, weights: torch.Tensor, moments: torch.Tensor | None) -> Operand:
        options = self.options
        if options.search == "none":
            return quantize(weights, options.weight)
        step = (1 - _LEAST_SHARE) / max(1, options.row_steps - 1)
        shares = tuple(1 - step * i for i in range(options.row_steps))
        return search_six_bits(weights, moments, options.group, shares)
