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

from flexq_bench.stats.change_points import SMALLEST_CHANGE, SMALLEST_LOG_RATIO, change_points
from flexq_bench.stats.segments import SHORTEST_SEGMENT
from flexq_bench.stats.steps import HISTORY_RULES, POINTS_BEFORE_FIRST
from flexq_bench.verdicts.verdict import Cause, Verdict

DETECTOR = "history"
# Raise it with every change that can give the same history another verdict.
DETECTOR_VERSION = 10
PARAMETERS: dict[str, Any] = {
    "points_before_first": POINTS_BEFORE_FIRST,
    "shortest_segment": SHORTEST_SEGMENT,
    "significance": HISTORY_RULES.significance,
    "smallest_step": HISTORY_RULES.smallest,
    "earlier_looks": HISTORY_RULES.earlier_looks,
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
    """The changes of level of a history, oldest first (`flexq_bench.stats.change_points`).

    values: oldest first, any unit. direction: the better direction, `lower` or `higher`.
    """
    return [
        Step(
            index=point.index,
            verdict=Verdict.SLOWER if worse > 0 else Verdict.FASTER,
            cause=Cause.UNCLEAR,
            reason=(
                f"level {point.mean_before:.6g} until here, {point.mean_after:.6g} from here on "
                f"({point.relative_change:+.2%}): {CAVEAT}"
            ),
            before=point.mean_before,
            after=point.mean_after,
            log_ratio=worse,
            p_value=point.p_value,
        )
        for point in change_points(values, HISTORY_RULES)
        for worse in [_worse(point.mean_before, point.mean_after, direction)]
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
