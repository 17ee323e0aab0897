"""Series of other projects: verdicts by their history alone, and their alerts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from flexq_bench.db import queries
from flexq_bench.db.decisions import DecisionInfo, add_decisions
from flexq_bench.db.engine import Session
from flexq_bench.db.identity import fingerprint, name_uuid
from flexq_bench.db.nightly import add_change_point, restore_change_point, retract_change_point
from flexq_bench.db.queries import ChangePointRow, CommitRow, HistoryPoint, ProjectSeries
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.verdicts import Verdict
from flexq_bench.verdicts.alert_rule import Group, kernel_family
from flexq_bench.verdicts.alerts import AlertChange, judge_open_alerts, open_or_join_alerts
from flexq_bench.verdicts.change_points import REACH
from flexq_bench.verdicts.history_verdict import (
    DETECTOR,
    DETECTOR_VERSION,
    PARAMETERS,
    RULE,
    Step,
    evidence_of,
    judge_history,
)
from flexq_bench.verdicts.standing import MAX_RESULTS, metric_of, newest_epoch

_SERIES_PER_READ = 100  # series whose histories are read at a time


@dataclass(frozen=True, slots=True)
class HistoryVerdicts:
    """Result of judging histories.

    opened, joined: ids of alerts. changed: alerts that moved or ended. improved: uuids of decisions
    for the better.
    """

    series: int = 0
    steps: int = 0
    opened: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    changed: tuple[AlertChange, ...] = ()
    improved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _StoredStep:
    """A step that is stored, or restored, with the results before it and at it."""

    series: ProjectSeries
    step: Step
    before: HistoryPoint
    first: HistoryPoint
    uuid: str
    lasts: bool  # the level was never back since


def judge_histories(
    session: Session, series_ids: Iterable[int] | None = None, *, alerting: bool = True
) -> HistoryVerdicts:
    """Detect new changes of level in series of other projects; store them, open and end alerts.

    series_ids None: all series with a project; others are ignored. A step is stored once, for any
    number of analyses, and retracted if later results contradict it. Steps for the worse that
    persist open alerts; a family of a project (names without bits) and a range of commits make one
    alert. Steps within one commit are not caused by code, and open none. The open alerts of the
    projects are judged again.
    """
    chosen = queries.project_series(session, series_ids)
    at = datetime.now(UTC)
    new_steps = [
        new
        for start in range(0, len(chosen), _SERIES_PER_READ)
        for new in _revise(session, chosen[start : start + _SERIES_PER_READ], at, watched=alerting)
    ]
    improved = tuple(new.uuid for new in new_steps if new.step.verdict is Verdict.FASTER)
    if not alerting:
        return HistoryVerdicts(len(chosen), len(new_steps), improved=improved)
    # Before alerts are opened: an alert that moves to the range of a new step is joined by it.
    changed = judge_open_alerts(session, at, projects={row.project for row in chosen})
    opened, joined = open_or_join_alerts(session, _groups(new_steps), at)
    return HistoryVerdicts(len(chosen), len(new_steps), opened, joined, changed, improved)


def family_of(project: str, kernel: str) -> str:
    """Return the key that groups a project's alerts: `project/name`, the name without its bits."""
    return f"{project}/{kernel_family(kernel)}"


def _revise(
    session: Session, rows: Sequence[ProjectSeries], at: datetime, *, watched: bool
) -> list[_StoredStep]:
    """Retract the steps of series that no longer hold; store the new ones, and return them."""
    ids = [row.id for row in rows]
    histories = queries.newest_histories(session, ids, commits=MAX_RESULTS)
    stored = queries.change_points_by_series(session, ids, with_retracted=True)
    new = []
    for row in rows:
        points = newest_epoch(histories.pop(row.id, []))
        new += _revise_one(session, row, points, stored.get(row.id, []), at, watched=watched)
    return new


def _revise_one(
    session: Session,
    row: ProjectSeries,
    points: Sequence[HistoryPoint],
    stored: Sequence[ChangePointRow],
    at: datetime,
    *,
    watched: bool,
) -> list[_StoredStep]:
    metric = metric_of(row)
    judged = judge_history(
        [point.median_us for point in points], metric, [point.reruns for point in points]
    )
    located = judged.steps
    places = {point.commit: place for place, point in enumerate(points)}
    for known in stored:
        place = places.get(known.commit)
        if place is None or known.retracted is not None:
            continue
        # A change that an earlier version reported may wait today.
        if all(abs(change.index - place) > REACH for change in judged.found.with_waiting):
            reason = judged.reason_without(place, known.before, known.after)
            retract_change_point(session, known.id, reason, at)
    new = []
    for step in located:
        first, before = points[step.index], points[step.index - 1]
        # Later results may move a step by a few.
        near = {p.commit for p in points[max(step.index - REACH, 0) : step.index + REACH + 1]}
        known_here = [point for point in stored if point.commit in near]
        if first.commit == before.commit or any(point.retracted is None for point in known_here):
            continue
        if known_here:
            restore_change_point(session, known_here[0].id)
            identity = known_here[0].decision
        else:
            identity = _store(session, row, points, step, at, watched=watched)
        later = (change for change in located if change.index >= step.index)
        lasts = not any(metric.is_back(step.before, change.after) for change in later)
        new.append(_StoredStep(row, step, before, first, identity, lasts))
    return new


def _store(
    session: Session,
    row: ProjectSeries,
    points: Sequence[HistoryPoint],
    step: Step,
    at: datetime,
    *,
    watched: bool,
) -> str:
    """Store the decision and the change point of a step; return the decision's uuid."""
    first, before = points[step.index], points[step.index - 1]
    evidence = evidence_of(
        [point.median_us for point in points],
        [point.reruns for point in points],
        [point.commit for point in points],
        metric_of(row),
        step,
    )
    identity = name_uuid(f"{DETECTOR} {DETECTOR_VERSION} {row.id} {fingerprint(evidence)}")
    decision = DecisionInfo(
        uuid=identity,
        series=queries.series_identity_of(session, row.id),
        base=_commit(before, row.project),
        head=_commit(first, row.project),
        device=DeviceInfo(f"{row.backend} {row.gpu}", row.gpu, row.backend),
        watched=watched,
        detector=DETECTOR,
        detector_version=DETECTOR_VERSION,
        parameters=PARAMETERS,
        evidence=evidence,
        verdict=step.verdict.value,
        cause=step.cause.value,
        reason=step.reason,
        log_ratio=step.log_ratio,
        log_ratio_low=None,
        log_ratio_high=None,
        created_at=at,
        rule=RULE,
        numbers={"before": step.before, "after": step.after, "p_value": step.p_value},
    )
    add_decisions(session, [decision])
    add_change_point(session, identity, first.commit, before=step.before, after=step.after)
    return identity


def _groups(new_steps: Sequence[_StoredStep]) -> list[Group]:
    """Persistent steps for the worse, by family and range of commits."""
    members: dict[tuple[str, str, str, str], list[_StoredStep]] = {}
    for new in new_steps:
        if new.step.verdict is Verdict.SLOWER and new.lasts:
            project = new.series.project
            family = family_of(project, new.series.kernel)
            key = family, project, new.before.commit, new.first.commit
            members.setdefault(key, []).append(new)
    return [
        Group(
            family,
            _row(steps_of_group[0].before, project),
            _row(steps_of_group[0].first, project),
            tuple(new.uuid for new in steps_of_group),
        )
        for (family, project, _, _), steps_of_group in members.items()
    ]


def _row(point: HistoryPoint, project: str) -> CommitRow:
    return CommitRow(point.commit, point.topo_order, point.subject, "", project)


def _commit(point: HistoryPoint, project: str) -> CommitInfo:
    # All others are stored already, and unknown values here change none of them.
    return CommitInfo(point.commit, None, None, dirty=False, project=project)
