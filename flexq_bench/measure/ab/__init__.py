"""Interleaved A/B measurement (ABBA) of two commits, or of two kernels, on one device.

Each commit runs in worker processes with its own worktree; two kernels run in one process.
"""

from flexq_bench.measure.ab.blocks import Block
from flexq_bench.measure.ab.commits import compare_commits, compare_trees
from flexq_bench.measure.ab.judged import compare_judged
from flexq_bench.measure.ab.kernels import compare_kernels
from flexq_bench.measure.ab.projects import (
    JudgedProject,
    compare_judged_project,
    compare_project,
    judged_project,
)
from flexq_bench.measure.ab.rules import InterleaveRules, Suffices, confirm_comparisons

__all__ = [
    "Block",
    "InterleaveRules",
    "JudgedProject",
    "Suffices",
    "compare_commits",
    "compare_judged",
    "compare_judged_project",
    "compare_kernels",
    "compare_project",
    "compare_trees",
    "confirm_comparisons",
    "judged_project",
]
