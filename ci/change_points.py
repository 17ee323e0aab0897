"""The retrospective pass: where the levels of a run's series changed, stored with its evidence."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from db import queries
from db.decisions import DecisionInfo
from db.engine import Session
from db.hashing import fingerprint
from db.nightly import add_change_point, restore_change_point, retract_change_point
from db.queries import HistoryPoint
from db.records import CommitInfo, DeviceInfo
from db.verdict_store import add_decision
from flexq_bench.stats.level_model import (
    LevelModel,
    Step,
    level_model,
)
from flexq_bench.stats.segments import SHORTEST_SEGMENT
from flexq_bench.stats.steps import HISTORY_RULES, POINTS_BEFORE_FIRST
from flexq_bench.verdicts import Cause, Verdict

NAME = "retrospective"
# Raise it with every change that can give the same history other change points.
VERSION = 5
PARAMETERS = {
    "points_before_first": POINTS_BEFORE_FIRST,
    "shortest_segment": SHORTEST_SEGMENT,
    "significance": HISTORY_RULES.significance,
    "smallest_step": HISTORY_RULES.smallest,
    "earlier_looks": HISTORY_RULES.earlier_looks,
}
_REACH = SHORTEST_SEGMENT - 1  # results that a step may move by and be the same
_NEARBY = 10
_LONGEST = 600  # newest results of a series that are looked at
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "flexq-bench")


@dataclass(frozen=True, slots=True)
class LookedBack:
    """Numbers of change points that a pass stored or restored, and that it retracted."""

    stored: int
    retracted: int


def store_change_points(session: Session, run_uuid: str, device: DeviceInfo) -> LookedBack:
    """Look back over every series of the run: store what is new, take back what no longer holds.

    A result of a commit outside of a git tree has no place in an order, and takes no part.
    """
    stored = retracted = 0
    series = {row.series_id for row in queries.run_results(session, run_uuid)}
    for series_id in sorted(series):
        points = queries.series_history(session, series_id, without_sweeps=True)
        last = points[-1].epoch if points else 0
        usable = [p for p in points if p.epoch == last and p.topo_order is not None][-_LONGEST:]
        model = level_model([result.median_us for result in usable], HISTORY_RULES)
        retracted += _retract(session, series_id, usable, model)
        for step in model.steps:
            stored += _store(session, series_id, usable, step, device)
    return LookedBack(stored, retracted)


def _retract(
    session: Session, series_id: int, results: Sequence[HistoryPoint], model: LevelModel
) -> int:
    """Take back stored steps that the model of all results explains otherwise; how many."""
    places = {result.commit: place for place, result in enumerate(results)}
    count = 0
    for known in queries.change_points_of(session, series_id):
        place = places.get(known.commit, 0)
        if place < POINTS_BEFORE_FIRST:  # too early in what is looked at to be seen again
            continue
        if any(abs(step.index - place) <= _REACH for step in model.steps):
            continue
        reason = no_step_reason(model, place)
        retract_change_point(session, known.id, reason, datetime.now(UTC))
        count += 1
    return count


def no_step_reason(model: LevelModel, index: int) -> str:
    """Explain in words why a model has no step at an index of its series."""
    for spell in model.spells:
        if spell.start - _REACH <= index <= spell.stop + _REACH:
            return f"the level was back after {spell.stop - spell.start} results"
    if model.modes is not None:
        return f"the series switches between two levels that are {model.modes.gap:.1%} apart"
    if any(abs(switch.index - index) <= _REACH for switch in model.switches):
        return "the series keeps coming back to the same levels"
    for drift in model.drifts:
        if drift.onset - _REACH <= index < drift.end:
            return f"a drift of {drift.slope:+.3%} a result explains it"
    near = [step.index for step in model.steps if abs(step.index - index) <= _NEARBY]
    if near:
        return f"later results place the step {near[0] - index:+d} results from here"
    return "later results do not bear it out"


def _store(
    session: Session,
    series_id: int,
    results: Sequence[HistoryPoint],
    step: Step,
    device: DeviceInfo,
) -> bool:
    first, before = results[step.index], results[step.index - 1]
    # No two steps are nearer than the shortest level: a later night may move one by a night or two.
    near = {p.commit for p in results[max(step.index - _REACH, 0) : step.index + _REACH + 1]}
    known = [
        one
        for one in queries.change_points_of(session, series_id, with_retracted=True)
        if one.commit in near
    ]
    if known:
        if any(one.retracted is None for one in known):
            return False
        restore_change_point(session, known[0].id)
        return True
    evidence = {
        "values": [result.median_us for result in results],
        "commits": [result.commit for result in results],
        "index": step.index,
        "p_value": step.p_value,
    }
    name = f"{NAME} {VERSION} {series_id} {fingerprint(evidence)}"
    identity = str(uuid.uuid5(_NAMESPACE, name))
    slower = step.after > step.before
    add_decision(
        session,
        DecisionInfo(
            uuid=identity,
            series=queries.series_identity_of(session, series_id),
            base=_commit(before),
            head=_commit(first),
            device=device,
            watched=False,
            detector=NAME,
            detector_version=VERSION,
            parameters=PARAMETERS,
            evidence=evidence,
            verdict=(Verdict.SLOWER if slower else Verdict.FASTER).value,
            cause=Cause.UNCLEAR.value,
            reason=f"level {step.before:.6g} until here, {step.after:.6g} from here on",
            log_ratio=math.log(step.after / step.before),
            log_ratio_low=None,
            log_ratio_high=None,
            created_at=datetime.now(UTC),
        ),
    )
    return add_change_point(session, identity, first.commit, before=step.before, after=step.after)


def _commit(point: HistoryPoint) -> CommitInfo:
    # The rest is stored already, and what is unknown here changes none of it.
    return CommitInfo(point.commit, None, point.topo_order, dirty=False)
