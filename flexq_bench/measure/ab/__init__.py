"""Two commits, or two kernels, that take turns on one device."""

from flexq_bench.measure.ab.case_comparison import (
    Block,
    CaseComparison,
    Comparer,
    InterleaveRules,
    judge,
)
from flexq_bench.measure.ab.commits import compare_commits, compare_trees
from flexq_bench.measure.ab.kernels import compare_kernels

__all__ = [
    "Block",
    "CaseComparison",
    "Comparer",
    "InterleaveRules",
    "compare_commits",
    "compare_kernels",
    "compare_trees",
    "judge",
]
