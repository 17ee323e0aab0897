"""FlexQ (arXiv:2508.04405): W6 in groups of 128, A6, and A8 for sensitive layers.

Rounding to nearest, without calibration. Section 3.2 finds down_proj of gated models to be the
sensitive kind and gives A8 to all of these layers; OPT is W6A6 throughout. With a budget, the sites
that gain most (flexq_bench.schemes.layer_sensitivity) get 8 bits instead, chosen on calibration
text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.layer_sensitivity import COSTS, Cost, activation_sensitivity, choose_sites
from flexq_bench.schemes.model_map import ModelMap
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions
from flexq_bench.schemes.uniform import FLEXQ_GROUP, round_site
from flexq_bench.workloads.names import unknown

SENSITIVE_KIND = "down_proj"  # of a gated feed-forward: FlexQ, section 3.2
NO_SITE = "none"
_HIGH = "high"  # sites with more bits


@dataclass(frozen=True, slots=True)
class FlexqOptions(SchemeOptions):
    """Bits and group of the paper.

    a8: kinds or names of sites with high_bits; empty: the paper's choice, down_proj of gated
        models; ("none",): no site.
    a8_budget: share of the layers that get high_bits, chosen on calibration data; None: as a8 says.
    a8_cost: what the budget is a share of: see layer_sensitivity.choose_sites.
    """

    w_bits: int = 6
    a_bits: int = 6
    high_bits: int = 8
    group: int = FLEXQ_GROUP
    a8: tuple[str, ...] = ()
    a8_budget: float | None = None
    a8_cost: str = "layers"

    def __post_init__(self) -> None:
        if self.a8 and self.a8_budget is not None:
            raise QuantizeError("a8 names the layers and a8_budget has them chosen: give one")
        if self.a8_cost not in COSTS:
            raise QuantizeError(unknown("cost named", self.a8_cost, COSTS))
        if self.a8_budget is not None and not 0 <= self.a8_budget <= 1:
            raise QuantizeError(
                f"a budget is a share of the layers, 0 to 1, got {self.a8_budget:g}"
            )


class Flexq(Scheme):
    """W6Ax, rounded to nearest."""

    version = 2  # 2: labels for a8_budget are drawn on the model's device
    source = "FlexQ, arXiv:2508.04405, sections 3.1 and 3.2"
    options: FlexqOptions

    @property
    def needs_calibration(self) -> bool:
        return self.options.a8_budget is not None

    needs_stream = False

    def prepare(self, state: QuantizationState) -> None:
        state.decided[_HIGH] = self._high_sites(state)

    def layer_formats(self, kind: str, gated: bool) -> LayerFormats:
        options = self.options
        named = options.a8 or ((SENSITIVE_KIND,) if gated else ())
        high = options.a8_budget is None and kind in named
        a_bits = options.high_bits if high else options.a_bits
        return LayerFormats(
            NumberFormat(options.w_bits, options.group), NumberFormat(a_bits, options.group)
        )

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        options = self.options
        for site in state.layout.of_block(block):
            a_bits = options.high_bits if site.name in state.decided[_HIGH] else options.a_bits
            round_site(state.model, site, options.w_bits, a_bits, options.group)

    def _high_sites(self, state: QuantizationState) -> tuple[str, ...]:
        """Return the names of the sites with more bits, in the order of the forward pass.

        Raises QuantizeError if `a8` names a site that the model doesn't have.
        """
        options = self.options
        if options.a8_budget is None or state.calibration is None:
            return named_sites(state.layout, options.a8 or paper_choice(state.layout))
        sensitivities = activation_sensitivity(
            state.model,
            state.layout,
            state.calibration,
            low=NumberFormat(options.a_bits, options.group),
            high=NumberFormat(options.high_bits, options.group),
            generator=state.generator,
            progress=state.progress,
        )
        return choose_sites(
            sensitivities, state.layout, options.a8_budget, cast("Cost", options.a8_cost)
        )


def paper_choice(layout: ModelMap) -> tuple[str, ...]:
    """Return the kinds with 8-bit activations in FlexQ: down_proj of gated models, else none."""
    return (SENSITIVE_KIND,) if layout.gated else (NO_SITE,)


def named_sites(layout: ModelMap, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """Return the sites of these kinds or names. Raises QuantizeError for an unknown one."""
    if chosen == (NO_SITE,):
        return ()
    known = (*layout.roles, *(site.name for site in layout.sites))
    for name in chosen:
        if name not in known:
            raise QuantizeError(unknown("layer", name, layout.roles))
    return tuple(s.name for s in layout.sites if s.role in chosen or s.name in chosen)
