"""Share of the perplexity gap between a worse and a better model that a third model closes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.bootstrap import Interval

_RESAMPLES = 4000


def gap_closed_interval(
    worse: ArrayLike, head: ArrayLike, better: ArrayLike, *, seed: int, confidence: float = 0.95
) -> Interval | None:
    """(PPL(worse) - PPL(head)) / (PPL(worse) - PPL(better)), PPL = exp of the mean of the segments.

    worse, head, better: [n], finite, n >= 2, nats per token; index i is the same segment.
    Percentile bootstrap over segments, which are resampled for all three together. 1: as good as
    `better`. None: there is no significant gap to close, because it vanishes in some resample.
    Raises ValueError if the shapes differ, there are fewer than two segments, a value is not
    finite, or confidence is not in (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    rows = [np.asarray(values, dtype=np.float64) for values in (worse, head, better)]
    if len({row.shape for row in rows}) > 1 or rows[0].ndim != 1 or rows[0].size < 2:
        raise ValueError(f"need three equal rows of at least 2, got {[row.shape for row in rows]}")
    table = np.stack(rows)
    if not np.isfinite(table).all():
        raise ValueError("values must be finite: find out where NaN or infinity came from")
    low, middle, high = np.exp(table.mean(axis=1))
    rng = np.random.default_rng(seed)
    drawn = rng.integers(table.shape[1], size=(_RESAMPLES, table.shape[1]))
    bad, tried, good = np.exp(table[:, drawn].mean(axis=2))
    if low <= high or bool((bad <= good).any()):
        return None
    estimate = float((low - middle) / (low - high))
    tail = (1 - confidence) / 2
    ends = np.quantile((bad - tried) / (bad - good), (tail, 1 - tail))
    return Interval(estimate, min(float(ends[0]), estimate), max(float(ends[1]), estimate))
