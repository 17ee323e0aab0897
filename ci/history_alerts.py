"""Series of other projects: verdicts by their history alone, and their alerts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from flexq_bench.db import queries
from flexq_bench.db.decisions import DecisionInfo, add_decision
from flexq_bench.db.engine import Session
from flexq_bench.db.identity import fingerprint, name_uuid
from flexq_bench.db.nightly import add_change_point
from flexq_bench.db.queries import AlertRow, CommitRow, HistoryPoint, ProjectSeries
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.stats.newest_step import SHORTEST_LEVEL
from flexq_bench.verdicts import Verdict
from flexq_bench.verdicts.alert_rule import Group, kernel_family
from flexq_bench.verdicts.alerts import close_fixed_alerts, open_or_join_alerts
from flexq_bench.verdicts.commit_points import one_per_commit
from flexq_bench.verdicts.history_verdict import (
    DETECTOR,
    DETECTOR_VERSION,
    PARAMETERS,
    RULE,
    Step,
    evidence_of,
    is_back,
    steps,
)

_MAX_RESULTS = 300  # of a series that are analysed, the newest


@dataclass(frozen=True, slots=True)
class HistoryVerdicts:
    """Result of judging histories.

    opened, joined, fixed: ids of alerts. improved: uuids of decisions for the better.
    """

    series: int = 0
    steps: int = 0
    opened: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()
    improved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _StoredStep:
    """A step that is stored for the first time, with the results before it and at it."""

    series: ProjectSeries
    step: Step
    before: HistoryPoint
    first: HistoryPoint
    uuid: str
    lasts: bool  # the newest level of the series is as bad as after this step


def judge_histories(
    session: Session, series_ids: Iterable[int] | None = None, *, alerting: bool = True
) -> HistoryVerdicts:
    """Detect new changes of level in series of other projects; store them, open and close alerts.

    series_ids None: all series with a project; others are ignored. A step is stored once, for any
    number of analyses. Steps for the worse that persist open alerts; a family of a project (names
    without bits) and a range of commits make one alert. Steps within one commit are not caused by
    code, and open none.
    """
    selected_ids = None if series_ids is None else set(series_ids)
    chosen = [
        row
        for row in queries.project_series(session)
        if selected_ids is None or row.id in selected_ids
    ]
    new_steps: list[_StoredStep] = []
    levels: dict[int, tuple[Sequence[HistoryPoint], list[Step]]] = {}
    at = datetime.now(UTC)
    for row in chosen:
        points = _usable(session, row.id)
        located = steps([point.median_us for point in points], row.direction)
        levels[row.id] = points, located
        new_steps += _new_steps(session, row, points, located, at, watched=alerting)
    improved = tuple(new.uuid for new in new_steps if new.step.verdict is Verdict.FASTER)
    if not alerting:
        return HistoryVerdicts(len(chosen), len(new_steps), improved=improved)
    opened, joined = open_or_join_alerts(session, _groups(new_steps), at)
    fixed = _close(session, {row.id: row for row in chosen}, levels, at)
    return HistoryVerdicts(len(chosen), len(new_steps), opened, joined, fixed, improved)


def family_of(project: str, kernel: str) -> str:
    """Return the key that groups a project's alerts: `project/name`, the name without its bits."""
    return f"{project}/{kernel_family(kernel)}"


def _usable(session: Session, series_id: int) -> list[HistoryPoint]:
    """The newest commits of the newest epoch on the main line."""
    points = one_per_commit(queries.series_history(session, series_id, without_sweeps=True))
    last = points[-1].epoch if points else 0
    return [point for point in points if point.epoch == last][-_MAX_RESULTS:]


def _new_steps(
    session: Session,
    row: ProjectSeries,
    points: Sequence[HistoryPoint],
    located: Sequence[Step],
    at: datetime,
    *,
    watched: bool,
) -> list[_StoredStep]:
    known = {point.commit for point in queries.change_points_of(session, row.id)}
    new = []
    for step in located:
        first, before = points[step.index], points[step.index - 1]
        # Two steps are at least the shortest level apart: later results may move one by a few.
        reach = SHORTEST_LEVEL - 1
        near = {p.commit for p in points[max(step.index - reach, 0) : step.index + reach + 1]}
        if near & known or first.commit == before.commit:
            continue
        evidence = evidence_of(
            [point.median_us for point in points],
            [point.commit for point in points],
            row.direction,
            step,
        )
        name = f"{DETECTOR} {DETECTOR_VERSION} {row.id} {fingerprint(evidence)}"
        identity = name_uuid(name)
        info = DecisionInfo(
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
        added = add_decision(session, info)
        add_change_point(session, identity, first.commit, before=step.before, after=step.after)
        if added:
            lasts = not is_back(step.before, located[-1].after, row.direction)
            new.append(_StoredStep(row, step, before, first, identity, lasts))
    return new


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


def _close(
    session: Session,
    rows: dict[int, ProjectSeries],
    levels: dict[int, tuple[Sequence[HistoryPoint], list[Step]]],
    at: datetime,
) -> tuple[int, ...]:
    """Close the alerts of these series if every series is back at the level before its step."""

    def closing_note(alert: AlertRow) -> str | None:
        if not alert.series or not set(alert.series) <= rows.keys():
            return None
        decisions = queries.alert_decisions(session, alert.id)
        goods = {
            decision.series_id: _level_before(session, decision.uuid) for decision in decisions
        }
        if not all(
            _has_come_back(levels[series], goods.get(series), rows[series].direction, alert)
            for series in alert.series
        ):
            return None
        heads = {levels[series][0][-1].commit[:10] for series in alert.series}
        return (
            f"every series is back at the level of {alert.good.sha[:10] if alert.good else ''} "
            f"at {', '.join(sorted(heads))}, by history alone"
        )

    return close_fixed_alerts(session, closing_note, at)


def _level_before(session: Session, decision: str) -> float | None:
    evidence = queries.decision_evidence(session, decision)
    level_changes = steps(evidence["values"], evidence["direction"])
    return next((step.before for step in level_changes if step.index == evidence["index"]), None)


def _has_come_back(
    level: tuple[Sequence[HistoryPoint], list[Step]],
    good: float | None,
    direction: str,
    alert: AlertRow,
) -> bool:
    points, located = level
    if good is None or not located or located[-1].verdict is not Verdict.FASTER:
        return False
    after = points[located[-1].index].commit != alert.bad.sha
    return after and is_back(good, located[-1].after, direction)


def _row(point: HistoryPoint, project: str) -> CommitRow:
    return CommitRow(point.commit, point.topo_order, point.subject, "", project)


def _commit(point: HistoryPoint, project: str) -> CommitInfo:
    # All others are stored already, and unknown values here change none of them.
    return CommitInfo(point.commit, None, None, dirty=False, project=project)
