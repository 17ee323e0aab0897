"""The retrospective pass: changes of level of a run's series, stored with their evidence.

A change of level at a change of device is no change point, unless other series with the same two
devices changed differently.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
from scipy import special

from flexq_bench.db import queries
from flexq_bench.db.decisions import DecisionInfo, add_decisions
from flexq_bench.db.engine import Session
from flexq_bench.db.identity import fingerprint, name_uuid
from flexq_bench.db.nightly import add_change_point, restore_change_point, retract_change_point
from flexq_bench.db.queries import HistoryPoint
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.stats.follower import SIGNIFICANCE
from flexq_bench.stats.level_model import DeviceChange
from flexq_bench.stats.log_series import SMALLEST_CHANGE, SMALLEST_LOG_RATIO, robust_scale
from flexq_bench.stats.newest_step import SHORTEST_LEVEL
from flexq_bench.verdicts import Cause, Verdict, history_verdict
from flexq_bench.verdicts.change_points import (
    REACH,
    Change,
    ChangePoints,
    Point,
    find_change_points,
    reason_without_step,
)
from flexq_bench.verdicts.standing import history_of

NAME = "retrospective"
# Raise it with every change that can give the same history other change points.
VERSION = 17
_FEWEST_OTHERS = 5
_LONGEST = 600  # newest results of a series that are analysed


@dataclass(frozen=True, slots=True)
class LookedBack:
    """Numbers of change points that a pass stored or restored, and that it retracted.

    device_changes: number of series whose level changed with the device two results before the
    newest, so that the cause may be the device or a commit.
    """

    stored: int
    retracted: int
    device_changes: int = 0


def store_change_points(session: Session, run_uuid: str, device: DeviceInfo) -> LookedBack:
    """Analyse every series of the run on the main line: store new change points, and retract those
    that no longer hold."""
    stored = retracted = changed = 0

    def revise(series_id: int, usable: Sequence[HistoryPoint], found: ChangePoints) -> None:
        nonlocal stored, retracted
        retracted += _retract(session, series_id, usable, found)
        stored += sum(_store(session, series_id, usable, step, device) for step in found.steps)

    series = {row.series_id for row in queries.run_results(session, run_uuid)}
    # Series with a change of device that may hide a step are decided later, by comparing all of
    # them.
    waiting: dict[int, ChangePoints] = {}
    changes: dict[tuple[int, int, str], dict[int, DeviceChange]] = defaultdict(dict)
    for series_id in sorted(series):
        usable = history_of(session, series_id, most=_LONGEST)
        found = find_change_points(
            [Point(one.median_us, one.device, reruns=one.reruns) for one in usable]
        )
        if found.model.device_changes:
            waiting[series_id] = found
            for change in found.model.device_changes:
                first, before = usable[change.index], usable[change.index - 1]
                changes[before.device, first.device, first.run][series_id] = change
            newest = found.model.device_changes[-1]
            changed += (
                len(usable) - newest.index == SHORTEST_LEVEL
                and abs(newest.relative_change) >= SMALLEST_CHANGE
            )
        else:
            revise(series_id, usable, found)
    beside: dict[int, list[Change]] = defaultdict(list)
    for same in changes.values():
        for series_id, step in steps_beside_others(same).items():
            beside[series_id].append(step)
    for series_id, found in waiting.items():
        usable = history_of(
            session, series_id, most=_LONGEST
        )  # read again, because all of them at once are large
        steps = sorted((*found.steps, *beside[series_id]), key=lambda step: step.index)
        revise(series_id, usable, replace(found, steps=tuple(steps)))
    return LookedBack(stored, retracted, changed)


def steps_beside_others(changes: Mapping[int, DeviceChange]) -> dict[int, Change]:
    """The steps among the changes of level, by series, that coincided with one change of device.

    A device changes all series alike. A step is a change that differs from the median of the others
    by 1 %, and significantly by Student's t for their robust scatter and its own error, at the
    significance of one look at one series for all series together. With fewer than 5 others there
    is none.
    """
    if len(changes) <= _FEWEST_OTHERS:
        return {}
    shifts = {series: math.log(change.after / change.before) for series, change in changes.items()}
    steps = {}
    for series, change in changes.items():
        others = np.array([shift for other, shift in shifts.items() if other != series])
        middle = float(np.median(others))
        scatter = float(robust_scale(others)) * math.sqrt(1 + math.pi / 2 / others.size)
        beyond = shifts[series] - middle
        error = max(scatter, math.hypot(change.error, scatter / math.sqrt(others.size)))
        p_value = 2 * float(special.stdtr(others.size - 1, -abs(beyond) / error))
        p_value = min(p_value * len(changes), 1.0)
        if abs(beyond) >= SMALLEST_LOG_RATIO and p_value <= SIGNIFICANCE:
            before = change.before * math.exp(middle)
            steps[series] = Change(change.index, before, change.after, p_value)
    return steps


def _retract(
    session: Session, series_id: int, results: Sequence[HistoryPoint], found: ChangePoints
) -> int:
    """Retract stored steps that the model of all results explains otherwise; count them."""
    places = {result.commit: place for place, result in enumerate(results)}
    count = 0
    for known in queries.change_points_of(session, series_id):
        place = places.get(known.commit, 0)
        if place < SHORTEST_LEVEL:  # too early in the analysed results to be detected again
            continue
        if any(abs(change.index - place) <= REACH for change in found.with_waiting):
            continue
        reason = reason_without_step(found, place, rises=known.after > known.before)
        retract_change_point(session, known.id, reason, datetime.now(UTC))
        count += 1
    return count


def _store(
    session: Session,
    series_id: int,
    results: Sequence[HistoryPoint],
    step: Change,
    device: DeviceInfo,
) -> bool:
    first, before = results[step.index], results[step.index - 1]
    near = {p.commit for p in results[max(step.index - REACH, 0) : step.index + REACH + 1]}
    known = [
        point
        for point in queries.change_points_of(session, series_id, with_retracted=True)
        if point.commit in near
    ]
    if known:
        if any(point.retracted is None for point in known):
            return False
        restore_change_point(session, known[0].id)
        return True
    evidence = {
        "values": [result.median_us for result in results],
        "devices": [result.device for result in results],
        "commits": [result.commit for result in results],
        "reruns": [result.reruns for result in results],
        "index": step.index,
        "p_value": step.p_value,
    }
    name = f"{NAME} {VERSION} {series_id} {fingerprint(evidence)}"
    identity = name_uuid(name)
    slower = step.after > step.before
    decision = DecisionInfo(
        uuid=identity,
        series=queries.series_identity_of(session, series_id),
        base=_commit(before),
        head=_commit(first),
        device=device,
        watched=False,
        detector=NAME,
        detector_version=VERSION,
        parameters=history_verdict.PARAMETERS,
        evidence=evidence,
        verdict=(Verdict.SLOWER if slower else Verdict.FASTER).value,
        cause=Cause.UNCLEAR.value,
        reason=f"level {step.before:.6g} until here, {step.after:.6g} from here on",
        log_ratio=math.log(step.after / step.before),
        log_ratio_low=None,
        log_ratio_high=None,
        created_at=datetime.now(UTC),
        rule=history_verdict.RULE,
        numbers={"before": step.before, "after": step.after, "p_value": step.p_value},
    )
    add_decisions(session, [decision])
    return add_change_point(session, identity, first.commit, before=step.before, after=step.after)


def _commit(point: HistoryPoint) -> CommitInfo:
    # All others are stored already, and unknown values here change none of them.
    return CommitInfo(point.commit, None, None, dirty=False)
