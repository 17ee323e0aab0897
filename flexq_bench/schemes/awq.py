"""AWQ: weights of channels with large activations are scaled up before rounding; then clipped.

Lin et al., arXiv 2306.00978: s = mean|X|^alpha with alpha from a grid of 20 over [0, 1] that
minimises the squared error of a layer's output (section 3.2, equations 4 and 5), and a clipping
range for each group from the same error (section 3.2). Weights only; groups of 128.

llm-compressor's AWQ folds and searches in the same way, but only for its own models and file
formats. The search here works on second moments, so it needs no layer outputs in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.kernels.formats import (
    ColumnGroup,
    NumberFormat,
    Operand,
    Scaling,
    assembled,
    quantize,
)
from flexq_bench.schemes.calibration import Statistics
from flexq_bench.schemes.channels import SiteInput
from flexq_bench.schemes.fake_quantization import quantize_site
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.model_map import LinearSite, weight_of
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions
from flexq_bench.schemes.site_inputs import fold_scale, observe_block, readers_of
from flexq_bench.schemes.smoothing import gather, spread, unrounded

# Only the softmax of their product matters, which their own error hardly predicts.
_UNCLIPPED = (
    *("q_proj", "k_proj", "qkv_proj", "query_key_value", "c_attn"),
    *("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)
_SMALLEST = 1e-4  # smallest mean magnitude of a channel, as 0 ** alpha is not a scale


@dataclass(frozen=True, slots=True)
class AwqOptions(SchemeOptions):
    """Options of AWQ.

    steps: number of steps of the grid of alpha. clip_steps: number of clipping shares tried, from 1
    down to smallest_share; 0: no clipping. symmetric: signed codes; the paper's codes have a zero
    point.
    """

    w_bits: int
    group: int | None = 128
    symmetric: bool = False
    steps: int = 20
    clip_steps: int = 10
    smallest_share: float = 0.5

    def __post_init__(self) -> None:
        if self.steps < 1 or self.clip_steps < 0 or not 0 < self.smallest_share <= 1:
            raise ValueError(
                "a grid has at least 1 step, clipping 0 or more down to a share above 0, got "
                f"{self.steps}, {self.clip_steps} and {self.smallest_share}"
            )

    def number(self, clip: float = 1.0) -> NumberFormat:
        """Format of the weights; clip: share of a group's range that codes span."""
        return NumberFormat(
            self.w_bits, self.group, "symmetric" if self.symmetric else "asymmetric", clip
        )


class Awq(Scheme):
    """Activation-aware scales, clipping, then rounding to nearest."""

    source = "AWQ, arXiv:2306.00978, section 3.2"
    options: AwqOptions
    needs_calibration = True

    def layer_formats(self, kind: str, gated: bool) -> LayerFormats:
        return LayerFormats(self.options.number())

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        statistics = Statistics(hessian=True)
        observe_block(state, block, statistics)
        with unrounded(state.layout.block_module(state.model, block)):
            divisors = self._scale_inputs(state, block, statistics)
            # After folding all scales, which changes rows of layers that produce a site's input.
            for site in state.layout.of_block(block):
                moments = statistics.hessian[site.name]
                if site.name in divisors:
                    moments = moments / torch.outer(divisors[site.name], divisors[site.name])
                self._quantize(state, site, moments.float())

    def _scale_inputs(
        self, state: QuantizationState, block: int, statistics: Statistics
    ) -> dict[str, torch.Tensor]:
        """Fold the best scales; returns the divisors of each site's inputs, float64 [K]."""
        divisors: dict[str, torch.Tensor] = {}
        for site_input in state.layout.scalable_inputs(block):
            readers = readers_of(state, block, site_input)
            divisors |= fold_scale(
                state, block, site_input, self._best_scale(state, site_input, readers, statistics)
            )
        return divisors

    def _best_scale(
        self,
        state: QuantizationState,
        site_input: SiteInput,
        readers: list[LinearSite],
        statistics: Statistics,
    ) -> torch.Tensor:
        """The scale of the source's channels with the least output error; ties: least alpha."""
        number = self.options.number()
        first = readers[0].name
        mean = (statistics.abs_sum[first] / statistics.count[first]).float()
        magnitude = gather(mean, site_input).clamp(min=_SMALLEST)
        weights = [weight_of(state.model, reader).float() for reader in readers]
        moments = statistics.hessian[first].float()
        best, least = torch.ones_like(magnitude), torch.inf
        for step in range(self.options.steps):
            scale = magnitude ** (step / self.options.steps)
            scale = scale / (scale.max() * scale.min()).sqrt()
            divisor = spread(scale, site_input)
            error = sum(
                output_error(number.round(weight * divisor) / divisor - weight, moments)
                for weight in weights
            )
            if error < least:
                best, least = scale, error
        return best

    def _quantize(self, state: QuantizationState, site: LinearSite, moments: torch.Tensor) -> None:
        weight = weight_of(state.model, site).float()
        clipped = self.options.clip_steps > 0 and site.kind not in _UNCLIPPED
        if clipped:
            rounded = clip_and_round(weight, moments, self.options)
        else:
            rounded = quantize(weight, self.options.number())
        quantize_site(state.model, site, rounded)


def output_error(difference: torch.Tensor, moments: torch.Tensor) -> float:
    """Return tr(D M Dᵀ), the squared error of a layer's output, for D [N, K] and M = Σ x xᵀ."""
    return float(((difference @ moments) * difference).sum())


def clip_and_round(weight: torch.Tensor, moments: torch.Tensor, options: AwqOptions) -> Operand:
    """Round weights [N, K]; the clipping of each group of each row minimises the output error.

    moments: [K, K], the sum of x xᵀ. The error of a group is that of its own part of the output.
    """
    number = options.number()
    groups = number.columns(weight.shape[1])
    best = [_best_clipping(weight, moments, group, options) for group in groups]
    return assembled(torch.cat([codes for codes, _ in best], dim=1), [s for _, s in best], number)


def _best_clipping(
    weight: torch.Tensor, moments: torch.Tensor, group: ColumnGroup, options: AwqOptions
) -> tuple[torch.Tensor, Scaling]:
    """Return the codes of one group [N, length] and their scaling; ties: the largest share."""
    block = weight[:, group.start : group.end]
    local = moments[group.start : group.end, group.start : group.end]
    least = torch.full((weight.shape[0], 1), torch.inf, device=weight.device)
    best: list[torch.Tensor] = []
    for step in range(options.clip_steps + 1):
        share = 1 - (1 - options.smallest_share) * step / options.clip_steps
        number = options.number(share)
        scaling = number.fit(block)
        rounder = number.rounder(scaling, block.dtype)
        codes = rounder.codes(block)
        difference = rounder.values(codes) - block
        error = ((difference @ local) * difference).sum(dim=1, keepdim=True)
        current = [codes, scaling.scales]
        current += [] if scaling.zero_points is None else [scaling.zero_points]
        better = error < least
        least = torch.where(better, error, least)
        best = [torch.where(better, *pair) for pair in zip(current, best or current, strict=True)]
    codes, scales, *zero_points = best
    return codes, Scaling(scales, zero_points[0] if zero_points else None)
