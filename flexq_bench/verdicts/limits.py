"""Limits of accepted changes: when a comparison exceeds one, and when it needs no more data."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from flexq_bench.verdicts.alert_rule import CONFIDENCE
from flexq_bench.verdicts.confirmation import Comparison, Confirmation, judged_blocks
from flexq_bench.verdicts.verdict import Verdict


def is_within(confirmation: Confirmation, percent: float) -> bool:
    """Return True if the upper 99 % bound of the slow-down is at most the limit."""
    return math.expm1(confirmation.high) * 100 <= percent


def exceeds(confirmation: Confirmation, percent: float) -> bool:
    """Return True for a slow-down whose estimate is above the limit."""
    is_slower = confirmation.verdict is Verdict.SLOWER
    return is_slower and math.expm1(confirmation.log_ratio) * 100 > percent


def is_enough(confirmation: Confirmation, percent: float, *, decided: bool) -> bool:
    """Return True if a gate with this limit needs no more placements.

    An ambiguous case needs none if its upper 99 % bound is within the limit, because the gate
    passes then: if a limit is well above the variation between processes, further placements would
    take most of a comparison's time. A change that few placements decided needs more if the limit
    is between its bounds. decided: more placements would not change the verdict.
    """
    if confirmation.verdict is Verdict.AMBIGUOUS:
        return decided or is_within(confirmation, percent)
    if decided and confirmation.stopped_early:
        return is_within(confirmation, percent) or math.expm1(confirmation.low) * 100 > percent
    return decided


def detectable_percent(comparison: Comparison, percent: float, *, power: float) -> float | None:
    """Return the slow-down, percent, that exceeds the limit with this probability.

    Of a comparison of as many placements with the same spread. None: it has too few.
    """
    blocks = judged_blocks(comparison)
    if not blocks.are_enough:
        return None
    means = blocks.means(blocks.ratios)
    error = float(means.std(ddof=1) / np.sqrt(means.size))
    seen = float(special.stdtrit(means.size - 1, power)) * error
    bound = float(special.stdtrit(means.size - 1, CONFIDENCE)) * error
    return 100 * math.expm1(max(math.log1p(percent / 100), bound) + seen)
