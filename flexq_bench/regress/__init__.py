"""Statistics of times and verdicts: pure functions on arrays, no I/O."""

from flexq_bench.regress.bootstrap import Interval, hierarchical_interval, median_interval
from flexq_bench.regress.ratio import ratio_interval

__all__ = ["Interval", "hierarchical_interval", "median_interval", "ratio_interval"]
