"""Statistics of times and accuracies: pure functions on arrays, without storage or kernels.

Intervals (bootstrap, over segments too, ratios, proportions, paired differences), a group
sequential test with planned error rates, variance components, device offsets and change points of a
series. `flexq_bench.verdicts` decides what a number means for a commit.
"""

from flexq_bench.stats.block_bootstrap import (
    block_quantile_intervals,
    distinct_blocks,
    wider_than_95,
)
from flexq_bench.stats.bootstrap import Interval, hierarchical_interval, median_interval
from flexq_bench.stats.change_points import ChangePoint, change_points
from flexq_bench.stats.device_offsets import DeviceOffset, device_offsets
from flexq_bench.stats.epoch_models import level_model_by_epoch
from flexq_bench.stats.group_sequential import Decision, GroupSequentialTest, TestPlan
from flexq_bench.stats.level_model import LevelModel, level_model
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
from flexq_bench.stats.proportion import proportion_interval
from flexq_bench.stats.ratio import geometric_mean, ratio_interval
from flexq_bench.stats.run_noise import RunNoise, larger_noise, run_noise, with_run_noise
from flexq_bench.stats.trimmed_mean import trimmed_mean, trimmed_mean_interval
from flexq_bench.stats.variance_components import variance_components

__all__ = [
    "ChangePoint",
    "Decision",
    "DeviceOffset",
    "GroupSequentialTest",
    "Interval",
    "ItemDifference",
    "LevelModel",
    "RunNoise",
    "TestPlan",
    "block_quantile_intervals",
    "change_points",
    "detectable_loss",
    "device_offsets",
    "distinct_blocks",
    "gap_closed_interval",
    "geometric_mean",
    "hierarchical_interval",
    "is_clear",
    "item_difference",
    "larger_noise",
    "level_model",
    "level_model_by_epoch",
    "loss_p_value",
    "mean_difference_interval",
    "median_interval",
    "proportion_interval",
    "questions_needed",
    "ratio_interval",
    "run_noise",
    "trimmed_mean",
    "trimmed_mean_interval",
    "variance_components",
    "wider_than_95",
    "with_run_noise",
]
