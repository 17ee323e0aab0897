"""Two commits, or two kernels, that take turns on one device."""

from flexq_bench.interleave.commits import compare_commits, compare_trees
from flexq_bench.interleave.judged import compare_judged
from flexq_bench.interleave.kernels import compare_kernels
from flexq_bench.interleave.values import Block, CaseComparison, Comparer, InterleaveRules, judge

__all__ = [
    "Block",
    "CaseComparison",
    "Comparer",
    "InterleaveRules",
    "compare_commits",
    "compare_judged",
    "compare_kernels",
    "compare_trees",
    "judge",
]
