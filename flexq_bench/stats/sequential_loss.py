"""A group-sequential test of paired scores: has head lost more than is accepted?

Questions come in random order, and are looked at when a part of them is answered. Head's loss is
the mean of base - head over questions, each the mean of k samples.

- No loss is accepted: if both are the same, the sign of each difference is a fair coin whatever its
  size. The sums at the looks then have an exact distribution, computed on a lattice: McNemar's
  exact test (1947) for k = 1, the sign-flip test of clusters (Fisher 1935) else.
- A loss m is accepted: the score test of the mean, sum(d - m) / sqrt(sum (d - m)^2), which is
  McNemar's statistic for m = 0 and k = 1. Its variance is at least m - m^2, that of a loss without
  a gain (Nam 1997, Biometrics 53:1422; Tango 1998, Stat. Med. 17:891).
- The same score test against the loss to detect ends the questions early if there is none.

Both errors are spent as O'Brien and Fleming's boundaries do (Lan and DeMets 1983, Biometrika
70:659), so that the last look costs nearly nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from flexq_bench.stats.paired import detectable_loss
from flexq_bench.stats.planned_mean import Decision

Floats = NDArray[np.float64]
LOOKS = (0.2, 0.4, 0.6, 0.8, 1.0)  # shares of the questions
_MIN_QUESTIONS = 20  # of a look that is not the last
_STEPS = 200  # of the lattice of a normal sum, in its standard deviation
_REACH = 8.0  # standard deviations
_RELEVANT = 0.5


@dataclass(frozen=True, slots=True)
class LossTest:
    """Losses and error rates. detect, accept: shares of the score, 0 <= accept < detect <= 1.

    alpha: largest probability of ABOVE if the loss is the accepted one. 1 - power: largest
    probability of BELOW if it is that to detect. Raises ValueError if these make no sense.
    """

    detect: float
    accept: float = 0.0
    alpha: float = 0.01
    power: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.accept < self.detect <= 1:
            raise ValueError(
                f"a loss to detect must be above the accepted one and at most 1, got "
                f"{self.detect} and {self.accept}"
            )
        if not (0 < self.alpha < 0.5 and 0.5 < self.power < 1):
            raise ValueError(
                f"alpha must be below 0.5 and power above it, got {self.alpha} and {self.power}"
            )

    @property
    def relevant(self) -> float:
        """The least estimate that fails: half of the way from the accepted loss to `detect`."""
        return self.accept + _RELEVANT * (self.detect - self.accept)

    def detectable(self, losses: ArrayLike) -> float:
        """The least loss that as many questions as losses [n], n >= 1, detect with the power.

        See stats.paired.detectable_loss; the mean square of losses is the share of questions that
        only one of both gets right, or for several samples what takes its place.
        """
        values = np.asarray(losses, dtype=np.float64)
        share, count = float(np.square(values).mean()), values.size
        loss = detectable_loss(share, count, alpha=self.alpha, power=self.power)
        return min(1.0, self.accept + loss)


def look_counts(questions: int) -> tuple[int, ...]:
    """Return the numbers of answered questions at which to look, the last of them all."""
    counts = {math.ceil(share * questions) for share in LOOKS}
    return tuple(sorted(n for n in counts if n >= _MIN_QUESTIONS or n == questions))


def decide_loss(
    test: LossTest, losses: ArrayLike, *, looks: Sequence[int], samples: int = 1
) -> Decision:
    """Decide at a look, given that no earlier one decided.

    losses: [n], base - head of each question, multiples of 1 / samples from -1 to 1, in the order
    of answering; n is one of `looks`, the planned numbers of questions. ABOVE: more than the
    accepted loss, and at least `test.relevant`. BELOW: less than that to detect.
    Raises ValueError if n is no look or a loss is no such multiple.
    """
    values = np.asarray(losses, dtype=np.float64)
    if values.size not in looks:
        raise ValueError(f"{values.size} questions are none of the looks {tuple(looks)}")
    counts = [count for count in looks if count <= values.size]
    times = [count / looks[-1] for count in counts]
    if values.mean() >= test.relevant:
        spent = [_spent(test.alpha, time) for time in times]
        exact = test.accept == 0
        above = (
            _flips_cross(values, counts, samples, spent)
            if exact
            else _score_crosses(values - test.accept, counts, test.accept, spent)
        )
        if above:
            return Decision.ABOVE
    spent = [_spent(1 - test.power, time) for time in times]
    if _score_crosses(test.detect - values, counts, test.detect, spent):
        return Decision.BELOW
    return Decision.OPEN


def decide_floor(
    test: LossTest, scores: ArrayLike, *, floor: float, looks: Sequence[int]
) -> Decision:
    """Decide at a look whether the mean of scores [n], from 0 to 1, is at least `floor`.

    ABOVE: it is less, with the test's alpha; BELOW: it is not, with its power. The exact bounds of
    a share (Clopper and Pearson 1934, Biometrika 26:404), at a part of the error for each look.
    """
    values = np.asarray(scores, dtype=np.float64)
    right, count = float(values.sum()), values.size
    wrong, looked = count - right, len(looks)
    alpha, beta = test.alpha / looked, (1 - test.power) / looked
    high = float(special.betaincinv(right + 1, wrong, 1 - alpha)) if wrong else 1.0
    if high < floor:
        return Decision.ABOVE
    low = float(special.betaincinv(right, wrong + 1, beta)) if right else 0.0
    return Decision.BELOW if low >= floor else Decision.OPEN


def _spent(error: float, time: float) -> float:
    """The part of an error probability that may be spent until a share of the questions."""
    return float(2 * special.ndtr(special.ndtri(error / 2) / math.sqrt(time)))


def _flips_cross(
    losses: Floats, counts: Sequence[int], samples: int, spent: Sequence[float]
) -> bool:
    """Return True if the sum crosses the exact boundary of the last look."""
    sizes = np.rint(losses * samples)
    if not np.allclose(sizes, losses * samples, atol=1e-6) or (np.abs(losses) > 1).any():
        raise ValueError(f"losses of {samples} samples must be multiples of 1 / {samples} up to 1")
    whole = sizes.astype(np.int64)
    parts = [
        _flipped(np.abs(whole[start:end]))
        for start, end in zip((0, *counts[:-1]), counts, strict=True)
    ]
    return _crosses(parts, lambda reach: int(whole.sum()) + reach, spent)


def _flipped(sizes: NDArray[np.int64]) -> Floats:
    """Probabilities of the sums -n … n of sizes with random signs, n their sum."""
    total = np.ones(1)
    for size, count in zip(*np.unique(sizes[sizes > 0], return_counts=True), strict=True):
        coins = stats.binom.pmf(np.arange(count + 1), count, 0.5)
        spread = np.zeros(2 * size * count + 1)
        spread[:: 2 * size] = coins
        total = np.convolve(total, spread)
    return total


def _score_crosses(
    shifted: Floats, counts: Sequence[int], mean: float, spent: Sequence[float]
) -> bool:
    """Return True if a sum, of mean 0 under the null, crosses the last look's normal boundary."""
    variance = max(float(np.square(shifted).mean()), mean - mean * mean)
    if variance == 0:  # a loss of everything was to be detected, and nothing is lost
        return bool(shifted.sum() > 0)
    step = math.sqrt(variance * counts[-1]) / _STEPS
    parts = []
    for start, end in zip((0, *counts[:-1]), counts, strict=True):
        deviation = math.sqrt(variance * (end - start)) / step
        reach = math.ceil(_REACH * deviation)
        edges = np.arange(-reach - 0.5, reach + 1) / deviation
        parts.append(np.diff(special.ndtr(edges)))
    place = float(shifted.sum()) / step
    return _crosses(parts, lambda reach: math.floor(place) + reach, spent)


def _crosses(parts: Sequence[Floats], place: Callable[[int], int], spent: Sequence[float]) -> bool:
    """Return True if a walk that crossed no earlier boundary crosses that of its last step.

    parts: distributions of the walk's steps, odd numbers of probabilities around 0. place: its
    index in a lattice of `reach` places on each side of 0. spent: of the error, until each step.
    """
    alive, used, boundary, reach = np.ones(1), 0.0, 0, 0
    for part, until in zip(parts, spent, strict=True):
        reach += part.size // 2
        alive = np.convolve(alive, part)
        tails = np.cumsum(alive[::-1])[::-1]
        allowed = np.flatnonzero(tails <= max(until - used, 0.0))
        boundary = int(allowed[0]) if allowed.size else alive.size
        used += float(tails[boundary]) if boundary < alive.size else 0.0
        alive = np.where(np.arange(alive.size) < boundary, alive, 0.0)
    return place(reach) >= boundary
