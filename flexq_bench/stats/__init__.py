"""Statistics of times and accuracies: pure functions on arrays, without storage or kernels.

Intervals (bootstrap, over segments too, ratios, proportions, paired differences), a test of a mean
with planned error rates, variance components, device offsets and change points of a
series. `flexq_bench.verdicts` decides what a number means for a commit.
"""

from flexq_bench.stats.block_bootstrap import (
    block_quantile_intervals,
    distinct_blocks,
    wider_than_95,
)
from flexq_bench.stats.bootstrap import Interval, hierarchical_interval, median_interval
from flexq_bench.stats.paired import (
    ItemDifference,
    detectable_loss,
    is_clear,
    item_difference,
    loss_p_value,
    mean_difference_interval,
    questions_needed,
)
from flexq_bench.stats.perplexity_gap import gap_closed_interval
from flexq_bench.stats.planned_mean import (
    GROWTH,
    MIN_VALUES,
    Decision,
    TestPlan,
    decide,
    simulated_rates,
)
from flexq_bench.stats.proportion import proportion_interval
from flexq_bench.stats.ratio import geometric_mean, ratio_interval
from flexq_bench.stats.tails import tail_excess, tail_size

__all__ = [
    "GROWTH",
    "MIN_VALUES",
    "Decision",
    "Interval",
    "ItemDifference",
    "TestPlan",
    "block_quantile_intervals",
    "decide",
    "detectable_loss",
    "distinct_blocks",
    "gap_closed_interval",
    "geometric_mean",
    "hierarchical_interval",
    "is_clear",
    "item_difference",
    "loss_p_value",
    "mean_difference_interval",
    "median_interval",
    "proportion_interval",
    "questions_needed",
    "ratio_interval",
    "simulated_rates",
    "tail_excess",
    "tail_size",
    "wider_than_95",
]
