"""Statistics of times and verdicts: pure functions on arrays, no I/O."""

from flexq_bench.regress.anchors import attribute, creep
from flexq_bench.regress.bootstrap import Interval, hierarchical_interval, median_interval
from flexq_bench.regress.classify import Classification, Nights, Pattern, classify
from flexq_bench.regress.components import variance_components
from flexq_bench.regress.confirm import Comparison, Confirmation, confirm, confirm_night
from flexq_bench.regress.gap import closed_share_interval
from flexq_bench.regress.noise_levels import NoiseLevels, noise_levels
from flexq_bench.regress.paired import (
    ItemDifference,
    is_clear,
    item_difference,
    mean_difference_interval,
)
from flexq_bench.regress.proportion import proportion_interval
from flexq_bench.regress.ratio import ratio_interval
from flexq_bench.regress.retrospective import ChangePoint, change_points
from flexq_bench.regress.trigger import Trigger, trigger
from flexq_bench.regress.verdict import Cause, Verdict

__all__ = [
    "Cause",
    "ChangePoint",
    "Classification",
    "Comparison",
    "Confirmation",
    "Interval",
    "ItemDifference",
    "Nights",
    "NoiseLevels",
    "Pattern",
    "Trigger",
    "Verdict",
    "attribute",
    "change_points",
    "classify",
    "closed_share_interval",
    "confirm",
    "confirm_night",
    "creep",
    "hierarchical_interval",
    "is_clear",
    "item_difference",
    "mean_difference_interval",
    "median_interval",
    "noise_levels",
    "proportion_interval",
    "ratio_interval",
    "trigger",
    "variance_components",
]
