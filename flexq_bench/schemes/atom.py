"""Atom, W4A4: outlier channels in 8 bits at the end of each row, the others in groups of 4 bits.

Zhao et al., arXiv 2310.19102: channels sorted by the square sum of the calibration inputs, the
last 128 kept in 8 bits (section 4.1), groups of 128 (section 4.2), ranges clipped to 0.9 of an
activation's and 0.85 of a weight's (section 4.4: the best of a grid search), GPTQ (section 4.4),
keys and values in asymmetric 4 bits a head (section 4.3). Each of these is a switch, so that the
steps of the paper's Table 4 can be measured one by one.

Keys are rounded before their rotary embedding, as in the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flexq_bench.schemes.activations import ActivationQuantizer, DynamicActivation, MixedActivation
from flexq_bench.schemes.calibration import Statistics
from flexq_bench.schemes.column_groups import ColumnGroup, column_groups, round_to_nearest
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import quantize_site
from flexq_bench.schemes.gptq import gptq_together
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.model_map import LinearSite, weight_of
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions
from flexq_bench.schemes.site_inputs import head_size, observe_block, readers_of
from kernels.formats import NumberFormat

_CACHED = ("k_proj", "v_proj")
KEPT_BITS = 16  # outliers that are not quantized


@dataclass(frozen=True, slots=True)
class AtomOptions(SchemeOptions):
    """Each step of Table 4 of arXiv 2310.19102.

    outliers:       channels kept apart; 0: none.
    outlier_bits:   8, or 16: as they are.
    group:          None: an output channel and a token.
    activation_clip, weight_clip: share of the range that 4-bit codes span; 1: all of it.
    gptq:           else rounded to nearest.
    kv_bits:        of keys and values, asymmetric, a scale a head and token; 16: as they are.
    """

    w_bits: int = 4
    a_bits: int = 4
    outliers: int = 128
    outlier_bits: int = 8
    group: int | None = 128
    activation_clip: float = 0.9
    weight_clip: float = 0.85
    gptq: bool = True
    kv_bits: int = field(default=4, kw_only=True)

    def __post_init__(self) -> None:
        if self.outliers < 0 or self.outlier_bits not in (8, KEPT_BITS):
            raise ValueError(
                "outliers is a number of channels, in 8 or 16 bits, got "
                f"{self.outliers} in {self.outlier_bits}"
            )


class Atom(Scheme):
    """Mixed 4 and 8 bits with reordered channels."""

    source = "Atom, arXiv:2310.19102, sections 4.1 to 4.4"
    options: AtomOptions

    @property
    def needs_calibration(self) -> bool:
        return True

    def layer_formats(self, kind: str, gated: bool) -> LayerFormats:
        options = self.options
        if options.outliers == 0:
            return LayerFormats(
                NumberFormat(options.w_bits, options.group, clip=options.weight_clip),
                NumberFormat(options.a_bits, options.group, clip=options.activation_clip),
            )
        is_mixed = (options.w_bits, options.a_bits, options.outlier_bits) == (4, 4, 8)
        if not is_mixed or options.group is None or options.outliers != options.group:
            return LayerFormats(NumberFormat(options.w_bits, options.group), None)
        return LayerFormats(
            NumberFormat(4, options.group, "mixed", options.weight_clip),
            NumberFormat(4, options.group, "mixed", options.activation_clip),
        )

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        options = self.options
        if options.kv_bits < KEPT_BITS and not set(_CACHED) <= set(state.layout.kinds):
            raise QuantizeError(
                f"{state.layout.architecture} has no {' and '.join(_CACHED)} whose outputs could "
                f"be cached with {options.kv_bits} bits: give atom-w4a4[kv_bits={KEPT_BITS}]"
            )
        statistics = Statistics(hessian=options.gptq)
        observe_block(state, block, statistics)
        for site_input in state.layout.site_inputs:
            readers = readers_of(state, block, site_input)
            first, outliers = readers[0], self._outliers(readers[0])
            order = reordering(statistics.square_sum[first.name], outliers)
            weights = [weight_of(state.model, site)[:, order] for site in readers]
            groups = self._groups(first.k, outliers)
            if options.gptq:
                hessian = statistics.hessian[first.name][order][:, order]
                solved = gptq_together(weights, hessian, groups)
            else:
                solved = [round_to_nearest(weight, groups) for weight in weights]
            for site, rounded in zip(readers, solved, strict=True):
                quantize_site(
                    state.model,
                    site,
                    rounded,
                    self._activation(site.k, outliers),
                    order=order.clone(),  # a stored tensor each
                    output=self._cache(state, site),
                )

    def _outliers(self, site: LinearSite) -> int:
        kept = self.options.outliers
        if kept >= site.k:
            raise QuantizeError(
                f"{site.name} has {site.k} inputs, too few to keep {kept} apart: give "
                f"{self.name.partition('[')[0]}[outliers={site.k // 8}] or another scheme"
            )
        return kept

    def _groups(self, k: int, outliers: int) -> tuple[ColumnGroup, ...]:
        options = self.options
        normal = NumberFormat(options.w_bits, options.group, clip=options.weight_clip)
        apart = NumberFormat(options.outlier_bits) if options.outlier_bits < KEPT_BITS else None
        return (
            *column_groups(k - outliers, normal),
            *column_groups(k, apart, start=k - outliers),
        )

    def _activation(self, k: int, outliers: int) -> ActivationQuantizer:
        options = self.options
        normal = DynamicActivation(
            NumberFormat(options.a_bits, options.group, clip=options.activation_clip)
        )
        if outliers == 0:
            return normal
        kept = options.outlier_bits == KEPT_BITS
        apart = None if kept else DynamicActivation(NumberFormat(options.outlier_bits))
        return MixedActivation((k - outliers, outliers), (normal, apart))

    def _cache(self, state: QuantizationState, site: LinearSite) -> DynamicActivation | None:
        if site.kind not in _CACHED or self.options.kv_bits == KEPT_BITS:
            return None
        return DynamicActivation(NumberFormat(self.options.kv_bits, head_size(state), "asymmetric"))


def reordering(square_sum: torch.Tensor, outliers: int) -> torch.Tensor:
    """Order of the channels, int64 [K]: ascending square sums, so that the outliers are last.

    Without outliers channels stay where they are: nothing is to be moved together.
    """
    if outliers == 0:
        return torch.arange(square_sum.numel(), device=square_sum.device)
    return torch.argsort(square_sum, stable=True)
