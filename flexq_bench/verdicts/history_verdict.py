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

from flexq_bench.stats.follower import SETTLED, SIGNIFICANCE
from flexq_bench.stats.log_series import SMALLEST_CHANGE, SMALLEST_LOG_RATIO
from flexq_bench.stats.newest_step import POINTS_BEFORE_FIRST, SHORTEST_LEVEL
from flexq_bench.verdicts.change_points import Point, find_change_points
from flexq_bench.verdicts.verdict import Cause, Verdict

DETECTOR = "history"
# Raise it with every change that can give the same history another verdict.
DETECTOR_VERSION = 11
PARAMETERS: dict[str, Any] = {
    "points_before_first": POINTS_BEFORE_FIRST,
    "shortest_level": SHORTEST_LEVEL,
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
class Step:
    """A change of level. index: of the first value on the new level.

    before, after: levels in the unit of the series. log_ratio: ln of the change, positive is worse.
    """

    index: int
    verdict: Verdict
    cause: Cause
    reason: str
    before: float
    after: float
    log_ratio: float
    p_value: float


def steps(values: Sequence[float], direction: str) -> list[Step]:
    """The changes of level of a history, oldest first (`flexq_bench.verdicts.change_points`).

    values: oldest first, any unit. direction: the better direction, `lower` or `higher`.
    """
    return [
        Step(
            index=change.index,
            verdict=Verdict.SLOWER if worse > 0 else Verdict.FASTER,
            cause=Cause.UNCLEAR,
            reason=(
                f"level {change.before:.6g} until here, {change.after:.6g} from here on "
                f"({change.relative:+.2%}): {CAVEAT}"
            ),
            before=change.before,
            after=change.after,
            log_ratio=worse,
            p_value=change.p_value,
        )
        for change in find_change_points([Point(value) for value in values]).steps
        for worse in [_worse(change.before, change.after, direction)]
    ]


def is_back(good: float, level: float, direction: str) -> bool:
    """Return True if a level is no worse than the good one, or by less than 1 %."""
    return _worse(good, level, direction) < SMALLEST_LOG_RATIO


def evidence_of(
    values: Sequence[float], commits: Sequence[str], direction: str, step: Step
) -> dict[str, Any]:
    """All inputs of a verdict; `judged_again` recomputes it from them."""
    return {
        "values": list(values),
        "commits": list(commits),
        "direction": direction,
        "index": step.index,
    }


def judged_again(evidence: Mapping[str, Any]) -> Step | None:
    """The step of stored evidence, recomputed; None: there is no step at its place.

    Raises KeyError, TypeError or ValueError for invalid evidence.
    """
    index = evidence["index"]
    changes = steps([float(value) for value in evidence["values"]], evidence["direction"])
    return next((step for step in changes if step.index == index), None)


def _worse(before: float, after: float, direction: str) -> float:
    change = math.log(after / before)
    return change if direction == "lower" else -change
