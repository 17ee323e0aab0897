"""Steps of a series, each tested against the noise and drift around it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from flexq_bench.stats.bends import CLIP_SIGMAS, SegmentFit, is_gradual
from flexq_bench.stats.boundary_tests import (
    BEYOND_A_LINE,
    BoundaryTests,
    innovations,
    jump,
)
from flexq_bench.stats.log_series import (
    MAX_AUTOCORRELATION,
    Floats,
    autocorrelation,
    difference_scale,
    resolution_scale,
    robust_scale,
    root_mean_square,
    step_proof_autocorrelation,
    without_spikes,
)
from flexq_bench.stats.modes import LONGEST_VISIT, MOST_MODES
from flexq_bench.stats.seasons import CALENDAR, WEEK
from flexq_bench.stats.segments import (
    SHORTEST_LINE,
    SHORTEST_SEGMENT,
    Segment,
    Sums,
    candidates,
    partition,
    residuals_of,
    settle,
)
from flexq_bench.stats.step_likelihood import best_place, innovation_variance, step_costs
from flexq_bench.stats.wander import Wander, find_wander

POINTS_BEFORE_FIRST = 5
# Costs of a boundary and of a slope, in ln(n) variances. The partition only proposes boundaries;
# the tests then remove false ones.
_PENALTY = 2.5
_LINE_PENALTY = 1.0
_SURE_LINE_PENALTY = 2.0  # for a line that would replace a step
# Standard errors added to the estimated memory.
_DOUBT = 1.0
_PHI_DOUBT = 1.0  # the same for the estimate from differences, which is only a lower bound
_STEP_SIGMAS = 5.0  # the smallest step, relative to the smallest noise
_NO_NOISE = 1e-6  # relative to the range of the values


# Probability of a false step in one look at one series: of any origin, without confirmation, and of
# a stored history.
SIGNIFICANCE = 0.001
HISTORY_SIGNIFICANCE = 0.002
# The smallest step of a stored history of times, as a fraction of the level. The limit for alerts
# is in `flexq_bench.verdicts.alert_rule`.
SMALLEST_STEP = 0.005


@dataclass(frozen=True, slots=True)
class StepRules:
    """Rules by which a step counts.

    significance: probability of a step in noise alone, in one look at the whole series. smallest:
    effect, a fraction of the level; noise is at least a fifth of it. most_counted: number of
    independent values, at most, that determine a level. The level of an uncontrolled series
    wanders, so that more values would separate levels that people regard as the same.
    earlier_looks: a step that is not clear by itself must also be found without the newest value,
    the newest two and so on, this many times; more often if the noise is autocorrelated. 0: one
    look decides. periods: of the seasonal components to look for, in values. longest_visit: number
    of values of the median visit of a mode; longer visits are levels. most_modes: largest number of
    modes. In a series of any origin, people regard visits to more than two as levels.
    wander_errors: standard errors above chance from which levels wander. ramps: lengths in values
    of ramps that count as steps. slow: lengths in values of ramps that explain small steps.
    """

    significance: float = SIGNIFICANCE
    smallest: float = 0.0
    most_counted: float = 30.0
    earlier_looks: int = 0
    periods: tuple[int, ...] = CALENDAR
    longest_visit: int = 15
    most_modes: int = 2
    wander_errors: float = 2.0
    ramps: tuple[int, ...] = (4, 7, 10)
    slow: tuple[int, ...] = (24, 36, 54, 80, 120)


ANY_SERIES = StepRules()  # of any origin and unit
# For times measured by the protocol, with known noise and unit, analysed every night. A comparison
# confirms their steps before people are alerted.
HISTORY_RULES = StepRules(
    significance=HISTORY_SIGNIFICANCE,
    smallest=SMALLEST_STEP,
    most_counted=float("inf"),
    earlier_looks=6,
    periods=(WEEK,),
    longest_visit=LONGEST_VISIT,
    most_modes=MOST_MODES,
    wander_errors=3.5,
    ramps=(),
    slow=(),
)


@dataclass(frozen=True, slots=True)
class Boundary:
    """Boundary of two segments. effect: jump; p_value: probability of one as large anywhere.

    A boundary without a jump is a change of slope.
    """

    index: int
    effect: float
    p_value: float


@dataclass(frozen=True, slots=True)
class Fit:
    """segments [k], boundaries [k - 1]; cleaned: [n] the values without spikes.

    sigma: of one value from its segment. memory: AR(1) coefficient.
    """

    segments: tuple[Segment, ...]
    boundaries: tuple[Boundary, ...]
    cleaned: Floats
    sigma: float
    memory: float


def fit_steps(values: Floats, rules: StepRules) -> Fit:
    """Segments of a series [n >= 2 shortest segments], and the steps between them.

    A step must differ from the noise around it by Student's t, with the variance of either side,
    the AR(1) memory, and a correction for all possible positions. It must also fit better than a
    straight line.
    """
    floor = max(
        rules.smallest / _STEP_SIGMAS, resolution_scale(values), _NO_NOISE * float(np.ptp(values))
    )
    spikeless = without_spikes(values, difference_scale(values, floor=floor))
    first = _fit(spikeless, spikeless, rules, floor)
    residuals = residuals_of(values, list(first.segments))
    limit = CLIP_SIGMAS * float(robust_scale(residuals, floor=floor))
    if float(np.abs(residuals).max()) <= limit:
        return first
    # Values outside their segment are outliers, also several in a row.
    clipped = values - residuals + np.clip(residuals, -limit, limit)
    return _fit(spikeless, clipped, rules, floor)


def _fit(values: Floats, cleaned: Floats, rules: StepRules, floor: float) -> Fit:
    """Fit segments to cleaned [n]; locate steps in values [n], which have no spikes and are not
    clipped.
    """
    sigma = difference_scale(cleaned, floor=floor)
    sums = Sums(cleaned)
    phi = step_proof_autocorrelation(cleaned, floor=floor)
    # The partition uses a low estimate of the memory, because extra boundaries are removed later.
    # The tests use a high one.
    least = max(phi - float(np.sqrt(2 / cleaned.size)), 0.0)
    inflation = (1 + least) / (1 - least)
    # Neighbours with memory differ less than independent values do.
    variance = sigma * sigma / (1 - least)
    unit = float(np.log(cleaned.size)) * variance * inflation
    places = candidates(sums, float(np.sqrt(variance * inflation)))
    places = places[places >= POINTS_BEFORE_FIRST]
    bounds = partition(sums, places, _PENALTY * unit, _LINE_PENALTY * unit)
    bounds = _stepped(sums, bounds, _LINE_PENALTY * unit)
    bounds = _straightened(sums, bounds, _LINE_PENALTY * unit, _PENALTY * unit)
    unit *= (1 - least) / inflation / (1 - phi) * (1 + phi) / (1 - phi)
    return _tested(values, cleaned, sums, bounds, unit, rules, phi, floor)


def _stepped(sums: Sums, bounds: list[int], line_penalty: float) -> list[int]:
    """Bounds, with an additional one in each line that a single step fits at least as well."""
    stepped = [0]
    for start, stop in pairwise(bounds):
        one = sums.fit(start, stop, line_penalty)
        if one.slope:
            at = np.arange(
                max(start + SHORTEST_SEGMENT, POINTS_BEFORE_FIRST), stop - SHORTEST_SEGMENT
            )
            left, _ = sums.residuals(np.full_like(at, start), at)
            right, _ = sums.residuals(at, np.full_like(at, stop))
            best = int(np.argmin(left + right))
            if left[best] + right[best] < one.residual:
                stepped.append(int(at[best]))
        stepped.append(stop)
    return stepped


def _straightened(sums: Sums, bounds: list[int], line_penalty: float, penalty: float) -> list[int]:
    """Bounds, without short pieces between two lines that one step fits as well."""
    left = list(bounds)
    at = 1
    while at + 2 < len(left):
        start, low, high, stop = left[at - 1 : at + 3]
        three = [sums.fit(a, b, line_penalty) for a, b in pairwise((start, low, high, stop))]
        if three[0].slope * three[2].slope > 0 and high - low < 2 * SHORTEST_LINE:
            places = np.arange(
                max(start + SHORTEST_LINE, low - SHORTEST_SEGMENT),
                min(stop - SHORTEST_LINE, high + SHORTEST_SEGMENT) + 1,
            )
            before = sums.residuals(np.full_like(places, start), places)[1]
            after = sums.residuals(places, np.full_like(places, stop))[1]
            two = before + after
            if two.size and two.min() < sum(one.residual for one in three) + penalty:
                left[at : at + 2] = [int(places[two.argmin()])]
                continue
        at += 1
    return left


def _tested(
    values: Floats,
    cleaned: Floats,
    sums: Sums,
    bounds: list[int],
    unit: float,
    rules: StepRules,
    phi: float,
    floor: float,
) -> Fit:
    """Remove the least likely boundary until all of them pass the test."""
    line = _SURE_LINE_PENALTY * unit
    segments = [sums.fit(a, b, line) for a, b in pairwise(bounds)]
    residuals = residuals_of(cleaned, segments)
    # Too many segments absorb the memory; differences of neighbours are not affected.
    shortest = phi - _PHI_DOUBT * float(np.sqrt(2 / cleaned.size))
    memory = max(_memory(residuals, segments), shortest)
    wander, without_own = find_wander(
        residuals,
        segments,
        memory,
        root_mean_square(residuals, floor=floor),
        errors=rules.wander_errors,
    )
    tests = _tests(sums, residuals, segments, rules, floor)
    kinks = [_is_kink(sums, *pair, unit) for pair in pairwise(segments)]
    p_values = tests.p_values(residuals, memory, without_own)
    while p_values.size:
        excess = np.where(
            np.abs(tests.effects) >= rules.smallest, p_values / rules.significance, np.inf
        )
        excess[kinks] = np.minimum(excess[kinks], 1.0)
        worst = int(np.argmax(excess))
        if excess[worst] <= 1:
            break
        merged = sums.fit(segments[worst].start, segments[worst + 1].stop, line)
        segments[worst : worst + 2] = [merged]
        residuals[merged.start : merged.stop] = residuals_of(cleaned, [merged])
        del kinks[worst], without_own[worst]
        for at in (worst - 1, worst):
            if 0 <= at < len(kinks):
                kinks[at] = _is_kink(sums, segments[at], segments[at + 1], unit)
        memory = max(_memory(residuals, segments), shortest)
        tests.remove(worst, residuals, segments)
        p_values = tests.p_values(residuals, memory, without_own)
    if p_values.size:
        bounds = settle(
            values,
            segments,
            _memory(residuals, segments),
            root_mean_square(residuals, floor=floor),
            first=POINTS_BEFORE_FIRST,
        )
        segments = [sums.fit(a, b, line) for a, b in pairwise(bounds)]
        residuals = residuals_of(cleaned, segments)
    tested = _boundaries(segments, p_values.tolist())
    fit = SegmentFit(cleaned, segments, [one.effect for one in tested], residuals, memory, floor)
    tested = [
        replace(one, p_value=1.0) if is_gradual(fit, i, rules.slow) else one
        for i, one in enumerate(tested)
    ]
    segments, tested = _with_single_steps(
        cleaned, sums, segments, tested, residuals, rules, memory, floor, wander
    )
    residuals = residuals_of(cleaned, segments)
    sigma = root_mean_square(residuals, floor=floor)
    return Fit(tuple(segments), tuple(tested), cleaned, sigma, memory)


def _tests(
    sums: Sums, residuals: Floats, segments: list[Segment], rules: StepRules, floor: float
) -> BoundaryTests:
    return BoundaryTests(
        sums,
        residuals,
        segments,
        floor=floor,
        lengths=rules.ramps,
        most_counted=rules.most_counted,
    )


def _boundaries(segments: list[Segment], p_values: list[float]) -> list[Boundary]:
    return [
        Boundary(right.start, jump(left, right), p_value)
        for (left, right), p_value in zip(pairwise(segments), p_values, strict=True)
    ]


def _with_single_steps(
    cleaned: Floats,
    sums: Sums,
    segments: list[Segment],
    tested: list[Boundary],
    residuals: Floats,
    rules: StepRules,
    memory: float,
    floor: float,
    wander: Wander,
) -> tuple[list[Segment], list[Boundary]]:
    """Replace lines by one step if they fit no better than it.

    Noise with memory turns a step into a line, or into a line between two levels. Commits cause
    steps.
    """
    first = 0
    while first < len(segments):
        last = first
        while last < len(tested) and tested[last].p_value > rules.significance:
            last += 1
        stretch = segments[first : last + 1]
        if any(one.slope for one in stretch) or len(stretch) > 2:
            at = _single_step(cleaned, stretch, residuals, memory, floor)
            if at is not None:
                bounds = (stretch[0].start, at, stretch[-1].stop)
                two = [sums.fit(low, high, np.inf) for low, high in pairwise(bounds)]
                others = [*segments[:first], *two, *segments[last + 1 :]]
                about = residuals_of(cleaned, others)
                step = float(
                    _tests(sums, about, two, rules, floor).p_values(
                        about, memory, [wander], or_line=False
                    )[0]
                )
                known = [one.p_value for one in tested]
                again = _boundaries(others, [*known[:first], step, *known[last:]])
                effects = [one.effect for one in again]
                fit = SegmentFit(cleaned, others, effects, about, memory, floor)
                if (
                    step <= rules.significance
                    and abs(effects[first]) >= rules.smallest
                    and not is_gradual(fit, first, rules.slow)
                ):
                    segments, residuals, tested, last = others, about, again, first + 1
        first = last + 1
    return segments, tested


def _single_step(
    cleaned: Floats, stretch: list[Segment], residuals: Floats, memory: float, floor: float
) -> int | None:
    """The position of one step that fits a stretch better than its segments; None: none does."""
    start, stop = stretch[0].start, stretch[-1].stop
    first = SHORTEST_SEGMENT if start else POINTS_BEFORE_FIRST
    places = np.arange(first, stop - start - SHORTEST_SEGMENT + 1)
    about = cleaned[start:stop] - float(cleaned[start:stop].mean())
    costs, information = step_costs(about, places, memory)
    sigma = root_mean_square(residuals, floor=floor)
    variance = innovation_variance(costs, about.size, sigma)
    explained = innovations(residuals[start:stop], memory)
    if explained - float(costs.min()) < BEYOND_A_LINE * variance:
        return None
    return start + int(places[best_place(costs, information, variance)])


def _is_kink(sums: Sums, left: Segment, right: Segment, unit: float) -> bool:
    """Return True if one line fits two segments, one of them a line, clearly worse than they do."""
    if not (left.slope or right.slope):
        return False
    together = sums.fit(left.start, right.stop, 0.0).residual
    return together - left.residual - right.residual > (_PENALTY + _LINE_PENALTY) * unit


def _memory(residuals: Floats, segments: list[Segment]) -> float:
    """AR(1) memory of the residuals, one standard error above its estimate, in [0, 0.8]."""
    fitted = len(segments) + sum(bool(one.slope) for one in segments)
    phi = autocorrelation(residuals, levels=fitted)
    error = float(np.sqrt((1 - phi * phi) / residuals.size))
    return min(phi + _DOUBT * error, MAX_AUTOCORRELATION)
