"""Confidence interval of a proportion."""

from __future__ import annotations

from scipy import special

from flexq_bench.stats.bootstrap import Interval


def proportion_interval(hits: int, trials: int, *, confidence: float = 0.95) -> Interval:
    """The rate hits / trials with its exact interval (Clopper and Pearson 1934, Biometrika 26).

    The interval is conservative: 0 of 30 has an upper end of 11.6 %. Raises ValueError if there are
    no trials, or not 0 <= hits <= trials.
    """
    if trials < 1 or not 0 <= hits <= trials:
        raise ValueError(f"a rate needs 0 <= hits <= trials and a trial, got {hits} of {trials}")
    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else float(special.betaincinv(hits, trials - hits + 1, tail))
    high = 1.0 if hits == trials else float(special.betaincinv(hits + 1, trials - hits, 1 - tail))
    return Interval(hits / trials, low, high)
