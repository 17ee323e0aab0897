"""Verdicts by history alone, for results that cannot be measured interleaved here.

A step of a series' level is itself the verdict: no second measurement confirms it, and no anchor
separates the effect of the code from that of the machine. Its cause is therefore `unclear`, and its
reason names the method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexq_bench.stats.follower import (
    LARGE,
    SELDOM,
    SETTLED,
    SIGNIFICANCE,
    SWITCHING,
)
from flexq_bench.stats.log_series import SMALLEST_CHANGE, SMALLEST_LOG_RATIO
from flexq_bench.stats.newest_step import SHORTEST_LEVEL
from flexq_bench.verdicts.change_points import (
    Change,
    ChangePoints,
    Point,
    Scale,
    find_change_points,
    reason_without_step,
)
from flexq_bench.verdicts.texts import levels_text
from flexq_bench.verdicts.verdict import Cause, Verdict

DETECTOR = "history"
# Raise it with every change that can give the same history another verdict.
DETECTOR_VERSION = 17
PARAMETERS: dict[str, Any] = {
    "shortest_level": SHORTEST_LEVEL,
    "switching": SWITCHING,
    "seldom": SELDOM,
    "large": LARGE,
    "settled": SETTLED,
    "significance": SIGNIFICANCE,
    "smallest_change": SMALLEST_CHANGE,
}
RULE = (
    "a change of the level of the series, over all of its results, which noise alone makes with a "
    "probability of at most the significance"
)
CAVEAT = "by history alone, no interleaved comparison confirms it"


@dataclass(frozen=True, slots=True)
class Metric:
    """Quantity of a series. direction: the better one, `lower` or `higher`."""

    name: str = "time"
    unit: str = "us"
    direction: str = "lower"

    @property
    def scale(self) -> Scale:
        return Scale.of(self.name, self.unit)

    def is_worse(self, before: float, after: float) -> bool:
        return after > before if self.direction == "lower" else after < before

    def is_back(self, good: float, level: float) -> bool:
        """Return True if a level is no worse than the good one, or by less than counts."""
        if not self.is_worse(good, level):
            return True
        if self.scale is Scale.RATIO:
            return abs(math.log(level / good)) < SMALLEST_LOG_RATIO
        return self.scale is Scale.COUNT and abs(level - good) < SMALLEST_CHANGE * abs(good)


@dataclass(frozen=True, slots=True)
class Step:
    """A change of level. index: of the first value on the new level.

    before, after: levels in the unit of the series. log_ratio: ln of the change, positive is worse;
    None: the change is a difference.
    """

    index: int
    verdict: Verdict
    cause: Cause
    reason: str
    before: float
    after: float
    log_ratio: float | None
    p_value: float


@dataclass(frozen=True, slots=True)
class Judged:
    """The changes of level of a history, oldest first, and what they were found in."""

    steps: tuple[Step, ...]
    found: ChangePoints

    def reason_without(self, index: int, before: float, after: float) -> str:
        """Explain why a change that was reported at an index, with these levels, is none today."""
        return reason_without_step(self.found, index, rises=after > before)


def judge_history(
    values: Sequence[float], metric: Metric, reruns: Sequence[Sequence[float]] = ()
) -> Judged:
    """Analyse a history (`find_change_points`). values: oldest first, in the metric's unit.

    reruns: results that each value combines; empty: it is one.
    """
    several = reruns or [()] * len(values)
    points = [Point(value, reruns=own) for value, own in zip(values, several, strict=True)]
    found = find_change_points(points, metric.scale)
    earlier = [change.before for change in found.steps]
    steps = (_step(one, earlier[:place], metric) for place, one in enumerate(found.steps))
    return Judged(tuple(steps), found)


def _step(change: Change, earlier: Sequence[float], metric: Metric) -> Step:
    """earlier: levels before the one before the change."""
    is_worse = metric.is_worse(change.before, change.after)
    return Step(
        index=change.index,
        verdict=Verdict.SLOWER if is_worse else Verdict.FASTER,
        cause=Cause.UNCLEAR,
        reason=(
            f"level {change.before:.6g} until here, {change.after:.6g} from here on "
            f"({change_text(change, metric)}){_of_earlier(change, earlier, metric)}: {CAVEAT}"
        ),
        before=change.before,
        after=change.after,
        log_ratio=_log_ratio(change, metric),
        p_value=change.p_value,
    )


def change_text(change: Change, metric: Metric) -> str:
    """Return the size of a change: `+5.00 %`, or `0 -> 5 spills` of counts and signed values."""
    if metric.scale is Scale.RATIO:
        return f"{100 * change.relative:+.2f} %"
    return levels_text(change.before, change.after, metric.unit)


def _of_earlier(change: Change, earlier: Sequence[float], metric: Metric) -> str:
    """Say if the new level is one that the series had before the change, and had left."""
    size = abs(change.difference)
    near = [level for level in earlier if abs(change.after - level) < size / 4]
    if not near:
        return ""
    level = min(near, key=lambda one: abs(change.after - one))
    return f", a return to an earlier level ({level:.6g} {metric.unit})"


def _log_ratio(change: Change, metric: Metric) -> float | None:
    if metric.scale is not Scale.RATIO:
        return None
    ratio = math.log(change.after / change.before)
    return ratio if metric.direction == "lower" else -ratio


def evidence_of(
    values: Sequence[float],
    reruns: Sequence[Sequence[float]],
    commits: Sequence[str],
    metric: Metric,
    step: Step,
) -> dict[str, Any]:
    """All inputs of a verdict; `judged_again` recomputes it from them."""
    several = {"reruns": [list(own) for own in reruns]} if any(reruns) else {}
    return several | {
        "values": list(values),
        "commits": list(commits),
        "metric": metric.name,
        "unit": metric.unit,
        "direction": metric.direction,
        "index": step.index,
    }


def judged_again(evidence: Mapping[str, Any]) -> Step | None:
    """The step of stored evidence, recomputed; None: there is no step at its place.

    Raises KeyError, TypeError or ValueError for invalid evidence.
    """
    # Earlier versions judged ratios only, and stored no unit.
    metric = Metric(
        evidence.get("metric", "time"), evidence.get("unit", "us"), evidence["direction"]
    )
    index = evidence["index"]
    values = [float(value) for value in evidence["values"]]
    return next(
        (
            step
            for step in judge_history(values, metric, evidence.get("reruns", ())).steps
            if step.index == index
        ),
        None,
    )
