"""Change points of a whole series, looking back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.stats.log_series import (
    MAX_AUTOCORRELATION,
    Floats,
    autocorrelation,
    positive_logs,
    robust_scale,
    step_proof_autocorrelation,
    step_proof_scale,
    without_spikes,
)
from flexq_bench.stats.modes import STICKY, has_modes, mode_memory, mode_steps
from flexq_bench.stats.permutation import contrast, step_p_value

SHORTEST_SEGMENT = 3
POINTS_BEFORE_FIRST = 10
# The smallest change that counts, in histories and in comparisons: as a fraction of the level
# before, and as a log ratio.
SMALLEST_CHANGE = 0.01
SMALLEST_LOG_RATIO = float(np.log1p(SMALLEST_CHANGE))
SIGNIFICANCE = 0.01
FEWEST_POINTS = POINTS_BEFORE_FIRST + SHORTEST_SEGMENT
# A candidate costs this times ln(n) variances. The search proposes, the permutations decide: lower
# than 3 takes longer and finds no more, higher loses three points on a level of 3 sigma.
_PENALTY = 3.0
_SURROUNDINGS = 20  # values on either side of a candidate that tell how noisy it is there
# Of noise in the test: neither tails nor spikes decide it, and the newest three nights still can.
_CLIP_SIGMAS = 3.5
# Standard errors that memory may be longer than it looks: levels that fit a short series well have
# taken some of it away. None gives 40 points of AR(1) noise false steps in 5 % of the series.
_DOUBT = 0.7


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """Where the level of a series changed.

    index: of the first value on the new level, in the series as given.
    mean_before, mean_after: of the neighbouring segments without spikes, in the unit of the series.
    relative_change: mean_after / mean_before - 1.
    p_value: of a step as large as this anywhere in the series, by permutation; at least 0.001.
    """

    index: int
    mean_before: float
    mean_after: float
    relative_change: float
    p_value: float


def change_points(
    values: ArrayLike,
    *,
    significance: float = SIGNIFICANCE,
    seed: int = 0,
) -> tuple[ChangePoint, ...]:
    """The changes of level of a series of positive numbers, oldest first.

    values: [n], any unit. What is NaN, infinite, zero or negative is a gap. A series of less than
    13 usable values has no change point, as has a constant one: the answer is empty, never an
    error. A level holds for at least 3 values, 10 come before the first change, and a change is at
    least 1 % of the level before. A series that returns three times to a level it
    had left has noise with modes: hopping between them is no change, a step of all of them is.

    Search: optimal partition of the logarithms under a linear kernel, which is least squares
    (Killick et al. 2012; ruptures' KernelCPD), after single spikes are replaced. Test: the step
    against the largest anywhere in `seed`ed permutations of the whole series about its other
    levels, made independent first by taking out AR(1) memory, then clipped at 3.5 sigmas. The least
    likely goes until all of them pass. Where noise has modes that it stays in, permuted are the
    visits to them.
    Raises ValueError if values is not one-dimensional.
    """
    logs, index = positive_logs(values)
    if logs.size < FEWEST_POINTS:
        return ()
    cleaned = without_spikes(logs)
    bounds = _search(cleaned, SMALLEST_LOG_RATIO)
    visits = _levels(cleaned, bounds)
    hops = has_modes(visits)
    p_values: dict[int, float] = {}
    if not hops or mode_memory(logs, visits) < STICKY:
        # Nights that draw their mode anew are exchangeable, as those of any other noise are.
        p_values = _steps(logs, bounds, significance, seed)
        hops = hops and has_modes(_levels(cleaned, [0, *sorted(p_values), logs.size]))
    if hops:
        p_values = mode_steps(
            visits,
            bounds,
            first=POINTS_BEFORE_FIRST,
            smallest=SMALLEST_LOG_RATIO,
            significance=significance,
            seed=seed,
        )
    bounds = _large_enough(cleaned, [0, *sorted(p_values), logs.size], SMALLEST_LOG_RATIO)
    levels = np.exp(cleaned)
    points = []
    for before, at, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
        if at < POINTS_BEFORE_FIRST:
            continue
        mean_before, mean_after = float(levels[before:at].mean()), float(levels[at:after].mean())
        change = mean_after / mean_before - 1
        points.append(ChangePoint(int(index[at]), mean_before, mean_after, change, p_values[at]))
    return tuple(points)


def _search(logs: Floats, smallest: float) -> list[int]:
    """Boundaries of the best segments whose levels differ enough, 0 and n among them."""
    from ruptures import KernelCPD  # near a second: `import flexq_bench.regress` does not pay it

    phi = step_proof_autocorrelation(logs)
    # The variance of a mean of n AR(1) values is this over n; differences of neighbours see less.
    sigma = step_proof_scale(logs) * np.sqrt(1 + phi) / (1 - phi)
    scaled = (logs - np.median(logs)) / sigma
    if float(np.ptp(scaled)) == 0:
        return [0, logs.size]
    search = KernelCPD(kernel="linear", min_size=SHORTEST_SEGMENT).fit(scaled[:, None])
    penalty = _PENALTY * float(np.log(logs.size))
    bounds = [0, *(int(end) for end in search.predict(pen=penalty))]
    bounds = _worth_it_there(scaled, bounds, penalty)
    return _large_enough(logs, bounds, smallest)


def _worth_it_there(scaled: Floats, bounds: list[int], penalty: float) -> list[int]:
    """Without the boundaries that cost more than they save by the noise of their own surroundings.

    scaled: in sigmas of the whole series. Where the noise grows, a stretch of it would else be cut
    into many levels, which look like modes that are visited again and again.
    """

    def saved(position: int) -> float:
        before, at, after = bounds[position - 1 : position + 2]
        around = scaled[max(at - _SURROUNDINGS, 0) : at + _SURROUNDINGS]
        sigma = max(step_proof_scale(around, floor=1.0), 1.0)
        return (contrast(scaled, before, at, after) / sigma) ** 2

    bounds = list(bounds)
    while len(bounds) > 2:
        savings = [saved(position) for position in range(1, len(bounds) - 1)]
        least = int(np.argmin(savings))
        if savings[least] >= penalty:
            break
        del bounds[least + 1]
    return bounds


def _large_enough(logs: Floats, bounds: list[int], smallest: float) -> list[int]:
    """Without the boundaries between levels closer than `smallest`, the smallest step first."""
    bounds = list(bounds)
    while len(bounds) > 2:
        steps = np.abs(np.diff(_levels(logs, bounds)))
        weakest = int(steps.argmin())
        if steps[weakest] >= smallest:
            break
        del bounds[weakest + 1]
    return bounds


def _levels(logs: Floats, bounds: list[int]) -> Floats:
    return np.array([float(logs[a:b].mean()) for a, b in pairwise(bounds)])


def _steps(logs: Floats, bounds: list[int], significance: float, seed: int) -> dict[int, float]:
    """Index and p-value of every step: the least likely goes until all of them pass."""
    bounds = list(bounds)
    while True:
        residuals = _about(logs, bounds)
        limit = _CLIP_SIGMAS * float(robust_scale(residuals))
        phi = _memory(residuals, bounds, limit)
        tested = {}
        for position in range(1, len(bounds) - 1):
            noise = _noise_without(logs, bounds, position, phi, limit)
            step = contrast(noise, *bounds[position - 1 : position + 2])
            p_value = step_p_value(
                noise, step, first=POINTS_BEFORE_FIRST, shortest=SHORTEST_SEGMENT, seed=seed
            )
            tested[bounds[position]] = p_value, step
        worst = max(tested, key=lambda at: (tested[at][0], -tested[at][1]), default=0)
        if not tested or tested[worst][0] <= significance:
            return {at: p_value for at, (p_value, _) in tested.items()}
        bounds.remove(worst)


def _noise_without(
    logs: Floats, bounds: list[int], position: int, phi: float, limit: float
) -> Floats:
    """What a series without the step at bounds[position] would be noise of, a value a night.

    It is the whole series about its other levels, which are medians, without its memory. Spikes are
    in it, clipped: without them their permutations would lack what made the step. So is a step that
    is larger than the noise: half of the nights beyond the limit are a step however far they are.
    """
    noise = _about(logs, [*bounds[:position], *bounds[position + 1 :]])
    noise[1:] -= phi * noise[:-1]
    noise[0] *= 1 - phi
    noise -= np.median(noise)
    return np.clip(noise, -limit, limit)


def _memory(residuals: Floats, bounds: list[int], limit: float) -> float:
    """AR(1) memory of what levels leave over: as long as it may well be, in [0, 0.8].

    Clipped at the limit, so that spikes don't hide it, and unclipped, for that of rare modes.
    """
    parts = [residuals[a:b] for a, b in pairwise(bounds)]
    phi = 0.0
    for most in (limit, np.inf):
        clipped = [np.clip(part, -most, most) for part in parts]
        centered = np.concatenate([part - part.mean() for part in clipped])
        phi = max(phi, autocorrelation(centered, levels=len(parts)))
    error = float(np.sqrt((1 - phi**2) / residuals.size))
    return min(phi + _DOUBT * error, MAX_AUTOCORRELATION)


def _about(logs: Floats, bounds: list[int]) -> Floats:
    """[n] the series about the medians of its levels."""
    return np.concatenate([logs[a:b] - np.median(logs[a:b]) for a, b in pairwise(bounds)])
