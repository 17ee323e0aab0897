"""A one-sided test of a mean in two looks, with planned error rates, for dependent skewed values.

Null: the mean is at most 0. Alternative: it is `effect`. The values are in the order of a text, and
may be autocorrelated, skewed, or carried by a few of them.

- The variance of the mean is that of the lowest frequencies of the series, which contain its
  autocorrelation: the mean square of cosine sums, with Student's t of as many degrees of freedom
  (Müller 2007, J. Econometrics 141:1331; Lazarus et al. 2018, J. Bus. Econ. Stat. 36:541).
- Skewness is corrected to first order (Hall 1992, J. R. Stat. Soc. B 54:221), also in the number of
  values that the plan needs.
- The first look, at MIN_VALUES, decides clear cases with a part of both errors. After that the
  number of values follows from their variance and skewness alone (an internal pilot, Wittes and
  Brittain 1990, Stat. Med. 9:65), and the mean is tested once more when it is reached.

The constants were chosen by simulation: benchmarks/accuracy/gate_power.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]
MIN_VALUES = 60  # a loss on 5 % of them is then missed altogether with a probability of 5 %
_FREQUENCIES = 0.5  # times n^(2/3): number of cosine sums
_MIN_FREQUENCIES = 4
_ALPHA_PARTS, _BETA_PARTS = (0.3, 0.5), (0.25, 0.75)  # of the errors, at the first and last look
_GROWTH = 1.05  # steps of the search for the number of values
_MOST = 1e12  # values
GROWTH = 1.25  # of the number of values, between estimates of their variance


class Decision(StrEnum):
    """Decision about the mean after a look."""

    ABOVE = "above"  # more than the null allows
    BELOW = "below"  # less than the effect
    OPEN = "open"  # more data is needed


@dataclass(frozen=True, slots=True)
class TestPlan:
    """Error rates of a test and the smallest effect that it must detect.

    effect: > 0, the mean to detect, in the unit of the data. alpha: largest probability of ABOVE if
    the mean is 0. power: smallest probability of ABOVE if the mean is the effect.

    Raises ValueError if the effect is not positive or a probability is not in (0, 1).
    """

    __test__ = False  # tells pytest that this is not a test

    effect: float
    alpha: float
    power: float

    def __post_init__(self) -> None:
        if not self.effect > 0:
            raise ValueError(f"an effect must be above 0, got {self.effect}")
        if not (0 < self.alpha < 0.5 and 0.5 < self.power < 1):
            raise ValueError(
                f"alpha must be below 0.5 and power above it, got {self.alpha} and {self.power}"
            )

    def needed(self, values: Floats) -> NDArray[np.int64]:
        """Number of values like these [..., n], n >= 2, that the test needs, by row."""
        spread = Spread.of(values)
        count = (self._reach(spread) * spread.deviation / self.effect) ** 2 + 1
        while (few := ~self._detects(spread, self.effect, count)).any():
            count = np.where(few, count * _GROWTH, count)
        needed: NDArray[np.int64] = np.ceil(np.clip(count, MIN_VALUES, _MOST)).astype(np.int64)
        return needed

    def planned(self, deviation: float) -> int:
        """Number of independent normal values of this deviation that the test needs."""
        count = MIN_VALUES
        while count < _MOST and count < (_plain_reach(self, count) * deviation / self.effect) ** 2:
            count = math.ceil(count * _GROWTH)
        return count

    def detectable(self, values: Floats) -> float:
        """The effect that these values [n], n >= 2, can detect, with the same error rates."""
        spread, count = Spread.of(values), np.asarray(values.size, dtype=np.float64)
        effect = float(self._reach(spread) * spread.deviation / math.sqrt(values.size))
        while not self._detects(spread, effect, count).all():
            effect *= _GROWTH
        return effect

    def _reach(self, spread: Spread) -> Any:
        """Distance of the alternative from the null in standard errors, without skewness."""
        return spread.quantile(_ALPHA_PARTS[1] * self.alpha) + self._missed(spread)

    def _missed(self, spread: Spread) -> Any:
        return spread.quantile(_BETA_PARTS[1] * (1 - self.power))

    def _detects(self, spread: Spread, effect: float, count: Floats) -> NDArray[np.bool_]:
        """Return True if a mean of this effect exceeds the last boundary with the power."""
        mean = effect - self._missed(spread) * spread.deviation / np.sqrt(count)
        limit = spread.quantile(_ALPHA_PARTS[1] * self.alpha)
        equal = spread.deviation == 0
        detects: NDArray[np.bool_] = (
            equal | (spread.student(mean, count) >= limit * (1 - 1e-9)) | (count >= _MOST)
        )
        return detects


def decide(plan: TestPlan, values: Floats, *, first: bool = False, last: bool = False) -> Decision:
    """Decide on all values so far [n], n >= 2, finite, in the order of the text.

    first: the look at MIN_VALUES, before which no value was looked at. last: there are no more
    values; a test with too few values for its power then stays OPEN, unless it is ABOVE.
    """
    above, below = _looks(plan, values[None], first=first, last=last)
    if above[0]:
        return Decision.ABOVE
    return Decision.BELOW if below[0] else Decision.OPEN


def simulated_rates(
    plan: TestPlan, losses: Floats, available: int, *, seed: int, draws: int = 2000
) -> tuple[float, float]:
    """Return the shares of simulated tests that err: ABOVE without a loss, BELOW at the effect.

    losses: [n], of which the simulated series are made: centred, in blocks of neighbours (circular
    block bootstrap, Politis and Romano 1992), scaled so that the plan needs about all of the
    `available` values, where the test is least certain.
    """
    rng, losses = np.random.default_rng(seed), np.asarray(losses, dtype=np.float64)
    count, block = losses.size, max(1, round(losses.size ** (1 / 3)))
    starts = rng.integers(count, size=(draws, math.ceil(available / block)))
    series = losses[(starts[:, :, None] + np.arange(block)) % count].reshape(draws, -1)
    series = series[:, :available] - losses.mean()
    scale = float(losses.std())
    if scale <= 1e-12 * float(np.abs(losses).max()):
        return 0.0, 0.0
    series *= plan.effect * math.sqrt(available / 2) / (scale * _plain_reach(plan, available))
    false_alarms, missed = (
        float(simulated_decisions(plan, series + mean)[side].mean())
        for side, mean in enumerate((0.0, plan.effect))
    )
    return false_alarms, missed


def simulated_decisions(
    plan: TestPlan, series: Floats
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.int64]]:
    """Run the test on each row of series [draws, n], of as many values as it asks for.

    Returns by row: whether it is ABOVE, whether it is BELOW, and the number of values it took.
    """
    draws, most = series.shape
    rows, count, first = np.arange(draws), min(MIN_VALUES, most), True
    above, below = np.zeros(draws, bool), np.zeros(draws, bool)
    taken = np.zeros(draws, np.int64)
    while rows.size:
        looked = _looks(plan, series[rows, :count], first=first, last=count == most)
        above[rows], below[rows] = looked
        taken[rows] = count
        rows = rows[~(looked[0] | looked[1])]
        if count == most:
            break
        count, first = min(most, math.ceil(GROWTH * count)), False
    return above, below, taken


def _looks(
    plan: TestPlan, values: Floats, *, first: bool, last: bool
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return by row of values [..., n] whether the mean is above the null, and below the effect."""
    count, mean = values.shape[-1], values.mean(axis=-1)
    spread, full = Spread.of(values), np.asarray(float(values.shape[-1]))
    equal = spread.deviation == 0  # all values are equal: there is no uncertainty
    complete = (count >= MIN_VALUES) & (count >= plan.needed(values))
    ends = complete | last
    part = np.where(ends, _ALPHA_PARTS[1], _ALPHA_PARTS[0])
    student = spread.student(mean, full)
    above = (ends | first) & (student > spread.quantile(part * plan.alpha))
    above = np.where(equal, mean > 0, above)
    below = complete
    if first and count >= MIN_VALUES:
        missed = spread.quantile(_BETA_PARTS[0] * (1 - plan.power))
        below = below | (spread.student(mean - plan.effect, full) < -missed)
    return above, below & ~above


def _plain_reach(plan: TestPlan, count: int) -> float:
    """Distance of the alternative from the null in standard errors, of independent values."""
    freedom = _freedom(count)
    tails = _ALPHA_PARTS[1] * plan.alpha, _BETA_PARTS[1] * (1 - plan.power)
    return -float(sum(special.stdtrit(freedom, tail) for tail in tails))


def _freedom(count: int) -> int:
    return max(_MIN_FREQUENCIES, int(_FREQUENCIES * count ** (2 / 3)))


@dataclass(frozen=True, slots=True)
class Spread:
    """Scatter of autocorrelated values, by row.

    deviation: times 1 / √n, the standard error of their mean.
    skew: standardized third moment of the values. freedom: degrees of freedom of the deviation.
    """

    deviation: Floats
    skew: Floats
    freedom: int

    @classmethod
    def of(cls, values: Floats) -> Spread:
        """Of values [..., n]."""
        count = values.shape[-1]
        away = values - values.mean(axis=-1, keepdims=True)
        plain, freedom = away.std(axis=-1, ddof=1), _freedom(count)
        # rounding of equal values
        plain = np.where(plain <= 1e-12 * np.abs(values).max(axis=-1), 0.0, plain)
        places = np.arange(count) + 0.5
        waves = np.cos(np.pi / count * np.outer(np.arange(1, freedom + 1), places))
        low = np.sqrt(((away @ waves.T) ** 2).mean(axis=-1) * 2 / count)
        skew = (away**3).mean(axis=-1) / np.where(plain > 0, plain, 1.0) ** 3
        # Losses of neighbours rarely cancel: a smaller variance than the plain one is an accident.
        return cls(np.where(plain > 0, np.maximum(low, plain), 0.0), skew, freedom)

    def quantile(self, tail: Any) -> Any:
        """Student's quantile that is exceeded with this probability."""
        return -special.stdtrit(self.freedom, tail)

    def student(self, mean: Any, count: Floats) -> Floats:
        """Student's t of a mean, without the first-order effect of skewness (Hall 1992).

        If losses are skewed downwards, small variances coincide with large means, and too many
        means would look significant. The transformation is monotone.
        """
        relative = mean / np.where(self.deviation > 0, self.deviation, 1.0)
        third = self.skew * relative / 3
        corrected = relative * (1 + third + third**2 / 3) + self.skew / (6 * count)
        student: Floats = np.sqrt(count) * corrected
        return student
