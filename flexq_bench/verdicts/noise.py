"""The noise of a series on each level, from A/A comparisons of commits with themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from flexq_bench.stats.variance_components import variance_components
from flexq_bench.verdicts.alert_rule import CONFIDENCE, smallest_change
from flexq_bench.verdicts.confirmation import Blocks, Comparison, blocks_at_equal_clocks
from flexq_bench.verdicts.process_modes import process_modes

MIN_CANARIES = 5  # fewer give no reliable floor
POWER = 0.9  # probability of detecting the smallest step


@dataclass(frozen=True, slots=True)
class NoiseLevels:
    """Sigmas of ln(head / base) where head is base; None: too few data.

    block: of a block within its placement. placement: of a placement's true offset within its
    comparison. comparison: of the effects common to a comparison (its processes, device and night).
    estimate: of a comparison's result, all levels together, from 0. noise_floor: the value that
    chance alone exceeds in 1 of 100 comparisons. smallest_step: the change detected in 9 of 10.
    """

    block: float | None
    placement: float | None
    comparison: float | None
    estimate: float
    noise_floor: float | None
    smallest_step: float | None
    comparisons: int
    placements: int
    blocks: int


def noise_levels(canaries: Sequence[Comparison]) -> NoiseLevels | None:
    """The levels of noise in comparisons of commits with themselves; None: no usable block.

    A comparison of a single placement has no estimate and does not count. If a placement has one
    block, its noise includes the block's. The true mean of the estimates is 0. The floor is the
    one-sided 99 % bound of Student's t for another comparison; it and the step need 5 comparisons.
    """
    usable = [
        blocks for canary in canaries if (blocks := blocks_at_equal_clocks(canary)).labels.size > 1
    ]
    if not usable:
        return None
    ratios = np.concatenate([blocks.ratios for blocks in usable])
    owner = np.repeat(np.arange(len(usable)), [blocks.ratios.size for blocks in usable])
    labels = np.concatenate(
        [np.unique(blocks.placement, return_inverse=True)[1] for blocks in usable]
    )
    comparison, placement, block = variance_components(ratios, [owner, labels])
    means = np.array([_estimate(blocks) for blocks in usable])
    estimate = float(np.sqrt(np.mean(means**2)))
    floor, step = _visible(estimate, len(usable))
    return NoiseLevels(
        block=_known(block),
        placement=_known(placement),
        comparison=_known(comparison),
        estimate=estimate,
        noise_floor=floor,
        smallest_step=step,
        comparisons=len(usable),
        placements=np.unique(np.stack([owner, labels]), axis=1).shape[1],
        blocks=ratios.size,
    )


def _estimate(canary: Blocks) -> float:
    """ln(head / base) as in `confirm`: with two speeds, each is compared with itself."""
    base, head = canary.sides()
    modes = process_modes(base, head)
    return float(np.mean(head - base)) if modes is None else modes.difference()[0]


def _visible(sigma: float, comparisons: int) -> tuple[float | None, float | None]:
    if comparisons < MIN_CANARIES:
        return None, None
    floor = float(special.stdtrit(comparisons, CONFIDENCE)) * sigma
    power = float(special.stdtrit(comparisons, POWER)) * sigma
    return floor, smallest_change(floor) + power


def _known(sigma: float) -> float | None:
    return None if np.isnan(sigma) else sigma
