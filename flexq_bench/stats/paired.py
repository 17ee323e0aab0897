"""Differences of two models on the same text and the same questions, with their uncertainty.

Segments are resampled in pairs, so that effects common to both models cancel. Answers are compared
by the questions that only one of the two models got right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from flexq_bench.stats.block_bootstrap import few_blocks_factor
from flexq_bench.stats.bootstrap import Interval

_RESAMPLES = 4000
_MAX_DRAWS = 4_000_000  # segments drawn for one interval


@dataclass(frozen=True, slots=True)
class ItemDifference:
    """Share of right answers of head minus base. McNemar's counts and exact p-value.

    only_base, only_head: questions that only this model got right. p_value: two-sided, of the
    hypothesis that both are equally likely.
    """

    interval: Interval
    only_base: int
    only_head: int
    p_value: float


def is_clear(interval: Interval) -> bool:
    """Return True if a difference exceeds its uncertainty: the interval excludes zero."""
    return interval.low > 0 or interval.high < 0


def mean_difference_interval(
    base: ArrayLike, head: ArrayLike, *, seed: int, confidence: float = 0.95
) -> Interval:
    """Interval of the mean of head - base over paired values, in their unit.

    base, head: [n], finite, n >= 2; index i is the same segment. Bootstrap over pairs (Efron and
    Tibshirani 1993, ch. 8 and 13). With few pairs the percentile interval is too narrow (Hesterberg
    2015, arXiv:1411.5279, section 4); its ends are moved outwards by the ratio of Student's
    quantile to the normal one and by sqrt(n / (n - 1)). Raises ValueError if the shapes differ,
    there are fewer than two pairs, a value is not finite, or confidence is not in (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    before = np.asarray(base, dtype=np.float64)
    after = np.asarray(head, dtype=np.float64)
    if before.shape != after.shape or before.ndim != 1 or before.size < 2:
        raise ValueError(
            f"paired values need two equal rows of at least 2, got {before.shape} and {after.shape}"
        )
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        raise ValueError("paired values must be finite: find out where NaN or infinity came from")
    differences = after - before
    count = differences.size
    estimate = float(differences.mean())
    tail = (1 - confidence) / 2
    resampled = differences[_draws(count, seed)].mean(axis=1) - estimate
    low, high = np.quantile(resampled, (tail, 1 - tail))
    wider = few_blocks_factor(count, confidence)
    return Interval(
        estimate, estimate + wider * min(float(low), 0.0), estimate + wider * max(float(high), 0.0)
    )


def item_difference(
    base: ArrayLike, head: ArrayLike, *, confidence: float = 0.95
) -> ItemDifference:
    """Compare right and wrong answers to the same questions.

    base, head: [n] of booleans, n >= 1; index i is the same question. The interval is that of
    Bonett and Price (2012, "Adjusted Wald confidence interval for a difference of binomial
    proportions based on paired data"), the p-value McNemar's exact one (1947). Raises ValueError if
    the shapes differ, there is no question, or confidence is not in (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    before, after = np.asarray(base, dtype=bool), np.asarray(head, dtype=bool)
    if before.shape != after.shape or before.ndim != 1 or before.size == 0:
        raise ValueError(
            f"paired answers need two equal rows of at least 1, got {before.shape} and "
            f"{after.shape}"
        )
    count = before.size
    only_base = int((before & ~after).sum())
    only_head = int((after & ~before).sum())
    estimate = (only_head - only_base) / count
    lost, won = (only_base + 1) / (count + 2), (only_head + 1) / (count + 2)
    center = won - lost
    reach = -float(special.ndtri((1 - confidence) / 2)) * math.sqrt(
        (won + lost - center * center) / (count + 2)
    )
    discordant = only_base + only_head
    fewer = min(only_base, only_head)
    p_value = min(1.0, 2 * float(special.bdtr(fewer, discordant, 0.5)))
    interval = Interval(estimate, max(-1.0, center - reach), min(1.0, center + reach))
    return ItemDifference(interval, only_base, only_head, p_value)


def loss_p_value(only_base: int, only_head: int) -> float:
    """McNemar's exact one-sided p-value of the hypothesis that head is no worse than base.

    only_base, only_head: as in ItemDifference.
    """
    discordant = only_base + only_head
    return float(special.bdtrc(only_base - 1, discordant, 0.5)) if only_base else 1.0


def questions_needed(discordant: float, loss: float, *, alpha: float, power: float) -> int:
    """Questions that McNemar's one-sided test needs for a loss (Connor 1987, Biometrics 43:207).

    discordant: share of questions that only one of the two models gets right; at least the loss.
    loss: share of right answers lost, in (0, 1). alpha, power: of the test. Raises ValueError if
    the loss is no share, or a probability is not in (0, 1).
    """
    if not 0 < loss < 1:
        raise ValueError(f"a loss must be between 0 and 1, got {loss}")
    if not (0 < alpha < 1 and 0 < power < 1):
        raise ValueError(f"alpha and power must be between 0 and 1, got {alpha} and {power}")
    share = max(discordant, loss)
    null = -float(special.ndtri(alpha)) * math.sqrt(share)
    other = float(special.ndtri(power)) * math.sqrt(share - loss * loss)
    return math.ceil(((null + other) / loss) ** 2)


def detectable_loss(discordant: float, questions: int, *, alpha: float, power: float) -> float:
    """The least loss, as a share of right answers, that this many questions detect.

    See questions_needed. 1: not even the loss of all of them.
    """
    low, high = 1e-6, 1 - 1e-6
    if questions_needed(discordant, high, alpha=alpha, power=power) > questions:
        return 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        enough = questions_needed(discordant, middle, alpha=alpha, power=power) <= questions
        low, high = (low, middle) if enough else (middle, high)
    return high


@lru_cache(maxsize=2)
def _draws(count: int, seed: int) -> NDArray[np.int64]:
    """[resamples, count]: the pairs of each resample, with replacement.

    Cached, because a history has many intervals of the same text, and drawing takes three times as
    long as the means. 32 MB at most.
    """
    resamples = max(1000, min(_RESAMPLES, _MAX_DRAWS // count))
    return np.random.default_rng(seed).integers(0, count, (resamples, count))
