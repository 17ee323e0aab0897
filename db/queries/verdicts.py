"""Queries for decisions, alerts and the A/A calibration."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from flexq_bench.db.errors import NotFoundError
from flexq_bench.db.identity import series_key
from flexq_bench.db.queries.commits import CommitRow, commit_columns
from flexq_bench.db.queries.filters import SERIES_ORDER, Filters
from flexq_bench.db.queries.pages import Listing, Page, count_of
from flexq_bench.db.queries.rows import columns_of, rows_of
from flexq_bench.db.tables import (
    Alert,
    AlertEvent,
    ChangePoint,
    Commit,
    Decision,
    DecisionEvidence,
    FalseAlarmRate,
    Measurement,
    Noise,
    Series,
)

# Made once: a statement about a new alias takes a millisecond more.
_BASE, _HEAD, _LATER = aliased(Commit), aliased(Commit), aliased(Noise)


@dataclass(frozen=True, slots=True)
class AlertRow:
    """An alert with a summary of its decisions.

    good None: bad since the first measurement. worst: the largest ln(head / base) of its
    decisions; None: only wrong results, or levels. levels: before and after the largest difference
    of a count or a signed value, and their unit; None: there are only ratios. series: ids.
    decisions: number.
    """

    id: int
    family: str
    state: str
    good: CommitRow | None
    bad: CommitRow
    opened_at: datetime
    closed_at: datetime | None  # None: open
    note: str
    series: tuple[int, ...]
    decisions: int
    gpus: tuple[str, ...]
    worst: float | None
    kernels: tuple[str, ...] = ()
    levels: tuple[float, float, str] | None = None


@dataclass(frozen=True, slots=True)
class AlertEventRow:
    """A change of an alert's state, or a note. person empty: the service."""

    state: str
    person: str
    note: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """A verdict on one series; units and None as in db.decisions.DecisionInfo."""

    uuid: str
    series_id: int
    kernel: str
    variant: str
    stage: str
    cache: str
    gpu: str
    operation: str
    shape: str  # parameters of the series' operation
    m: int | None
    n: int | None
    k: int | None
    metric: str
    unit: str
    direction: str
    base: str | None  # sha; None: history
    head: str
    head_order: int | None
    alert_id: int | None
    detector: str
    detector_version: int
    parameters: dict[str, Any]
    input_hash: str
    verdict: str
    cause: str
    reason: str
    log_ratio: float | None
    log_ratio_low: float | None
    log_ratio_high: float | None
    created_at: datetime
    rule: str
    numbers: dict[str, Any] | None
    decided_hash: str | None


@dataclass(frozen=True, slots=True)
class CanaryRow:
    """A decision on a commit compared with itself."""

    uuid: str
    series_id: int
    verdict: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A comparison of two commits: shas, its verdict, and ln(head / base).

    head_order: place of head on the main line; None: it is not there.
    """

    base: str
    head: str
    verdict: str
    log_ratio: float | None
    head_order: int | None


def alerts(
    session: Session, *, states: Sequence[str] = (), family: str | None = None
) -> list[AlertRow]:
    """Return alerts, newest first. states: only these; empty: all. family None: all."""
    conditions: list[ColumnElement[bool]] = []
    if states:
        conditions.append(Alert.state.in_(states))
    if family is not None:
        conditions.append(Alert.family == family)
    return _alerts(session, *conditions)


_ALERTS = Listing(Alert.id, (Alert.opened_at, Alert.id), (True, True))


def alerts_page(
    session: Session, filters: Filters, page: Page, *, states: Sequence[str] = ()
) -> tuple[list[AlertRow], int]:
    """Return a page of the alerts, newest first, and the number of all.

    filters: projects, kernels and gpus (of one of its series), since and until (when it was opened)
    apply.
    """
    conditions: list[ColumnElement[bool]] = []
    if states:
        conditions.append(Alert.state.in_(states))
    of_series = Filters(
        kernels=filters.kernels, gpus=filters.gpus, metrics=filters.metrics
    ).on_series()
    if of_series:
        decided = exists().where(Decision.alert_id == Alert.id, Decision.series_id == Series.id)
        conditions.append(decided.where(*of_series))
    if filters.projects:
        bad = aliased(Commit)
        conditions.append(
            exists().where(bad.id == Alert.bad_commit_id, bad.project.in_(filters.projects))
        )
    if filters.since is not None:
        conditions.append(Alert.opened_at >= filters.since)
    if filters.until is not None:
        conditions.append(Alert.opened_at <= filters.until)
    query = select(Alert.id).where(*conditions)
    ids = session.scalars(_ALERTS.page(session, query, page)).all()
    return _alerts(session, Alert.id.in_(ids)), count_of(session, query)


def count_alerts(session: Session, *, states: Sequence[str]) -> int:
    """Return the number of alerts in these states."""
    return count_of(session, select(Alert.id).where(Alert.state.in_(states)))


def alert_by_id(session: Session, alert_id: int) -> AlertRow:
    """Return an alert. Raises NotFoundError."""
    rows = _alerts(session, Alert.id == alert_id)
    if not rows:
        raise NotFoundError(
            f"no alert {alert_id}: `flexq-bench alerts list` shows the open ones, "
            "with --state all every one"
        )
    return rows[0]


def alert_events(session: Session, alert_id: int) -> list[AlertEventRow]:
    """Return the events of an alert, oldest first."""
    query = (
        select(*columns_of(AlertEventRow, AlertEvent))
        .where(AlertEvent.alert_id == alert_id)
        .order_by(AlertEvent.created_at, AlertEvent.id)
    )
    return rows_of(session, AlertEventRow, query)


def alert_members(session: Session, alert_ids: Iterable[int]) -> list[tuple[int, str, int]]:
    """Return alert, detector and series of the decisions of alerts, each combination once."""
    query = (
        select(Decision.alert_id, Decision.detector, Decision.series_id)
        .where(Decision.alert_id.in_(list(alert_ids)))
        .order_by(Decision.series_id)
        .distinct()
    )
    rows = session.execute(query)
    return [
        (alert, detector, series)
        for alert, detector, series in rows
        if alert is not None and series is not None
    ]


def alert_decisions(session: Session, alert_id: int) -> list[DecisionRow]:
    """Return the decisions of an alert: wrong results, then slowest first."""
    slowest = Decision.log_ratio.desc().nulls_first()
    return _decisions(session, Decision.alert_id == alert_id, order=(slowest, Decision.uuid))


# Without a ratio: a wrong result, which comes first.
_SLOWEST_FIRST = Listing(
    Decision.uuid, (func.coalesce(Decision.log_ratio, 1e9), Decision.uuid), (True, False)
)


def alert_decisions_page(session: Session, alert_id: int, page: Page) -> list[DecisionRow]:
    """Return a page of `alert_decisions`."""
    of_alert = select(Decision.id).where(Decision.alert_id == alert_id)
    ids = session.scalars(_SLOWEST_FIRST.page(session, of_alert, page)).all()
    order = (Decision.log_ratio.desc().nulls_first(), Decision.uuid)
    return _decisions(session, Decision.id.in_(ids), order=order)


def decisions_by_uuid(session: Session, uuids: Iterable[str]) -> list[DecisionRow]:
    """Return decisions, oldest first; those that are not stored are left out."""
    order = (Decision.created_at, Decision.id)
    return _decisions(session, Decision.uuid.in_(list(uuids)), order=order)


def decision_evidence(session: Session, decision_uuid: str) -> dict[str, Any]:
    """Return the exact inputs of a decision. Raises NotFoundError if it is not stored."""
    data = session.scalar(
        select(DecisionEvidence.data)
        .join(Decision, DecisionEvidence.decision_id == Decision.id)
        .where(Decision.uuid == decision_uuid)
    )
    if data is None:
        raise NotFoundError(f"no decision {decision_uuid} is stored with its evidence")
    evidence: dict[str, Any] = json.loads(zlib.decompress(data))
    return evidence


def latest_comparisons(
    session: Session, base_shas: Iterable[str], series_ids: Iterable[int]
) -> dict[tuple[str, int], ComparedRow]:
    """Return the comparison of each series on the latest commit against each base.

    Of the watched branch; by base and series.
    """
    of_series = Decision.series_id.in_(list(series_ids))
    watched = Decision.watched.is_(True)
    rows = _compared(session, of_series, watched, bases=base_shas, latest_head_last=True)
    return {(row.base, series): row for series, row in rows}


def comparisons_of(
    session: Session, series_ids: Iterable[int], *, since: datetime
) -> dict[int, list[ComparedRow]]:
    """Return the comparisons of two commits decided since a time, by series, oldest first."""
    of_series = Decision.series_id.in_(list(series_ids))
    rows: dict[int, list[ComparedRow]] = defaultdict(list)
    for series, row in _compared(session, of_series, Decision.created_at >= since):
        rows[series].append(row)
    return rows


def _compared(
    session: Session,
    *conditions: ColumnElement[bool],
    bases: Iterable[str] | None = None,
    latest_head_last: bool = False,
) -> list[tuple[int, ComparedRow]]:
    """Return comparisons of two commits with their series, oldest first."""
    first = [_HEAD.position.nulls_first()] if latest_head_last else []
    query = (
        select(
            Decision.series_id,
            *columns_of(
                ComparedRow, Decision, base=_BASE.sha, head=_HEAD.sha, head_order=_HEAD.position
            ),
        )
        .join(_BASE, Decision.base_commit_id == _BASE.id)
        .join(_HEAD, Decision.head_commit_id == _HEAD.id)
        .where(*conditions, Decision.base_commit_id != Decision.head_commit_id)
        .order_by(*first, Decision.created_at, Decision.id)
    )
    if bases is not None:
        query = query.where(_BASE.sha.in_(list(bases)))
    return [(series, ComparedRow(*values)) for series, *values in session.execute(query)]


def last_measured(session: Session, series_ids: Iterable[int]) -> dict[int, datetime]:
    """Return the time of the last result by series; reads no older one."""
    last = select(func.max(Measurement.created_at)).where(Measurement.series_id == Series.id)
    query = select(Series.id, last.scalar_subquery()).where(Series.id.in_(list(series_ids)))
    return {series: time for series, time in session.execute(query) if time is not None}


def commits_measured_after(session: Session, time: datetime, *, project: str) -> int:
    """Return the number of commits of a project that were measured after a time."""
    query = (
        select(func.count(Measurement.commit_id.distinct()))
        .join(Commit, Measurement.commit_id == Commit.id)
        .where(Commit.project == project, Commit.position.is_not(None))
        .where(Measurement.created_at > time)
    )
    return session.scalars(query).one()


def decisions_between(session: Session, base_sha: str, head_sha: str) -> dict[int, DecisionRow]:
    """Return the newest decision on these two commits by series, on any branch."""
    base = aliased(Commit)
    rows = _decisions(
        session,
        Commit.sha == head_sha,
        Decision.base_commit_id.in_(select(base.id).where(base.sha == base_sha)),
        order=(Decision.created_at, Decision.id),
    )
    return {row.series_id: row for row in rows}


def canaries(session: Session, *, since: datetime, until: datetime) -> list[CanaryRow]:
    """Return decisions on a commit compared with itself within a period, oldest first."""
    query = (
        select(Decision.uuid, Decision.series_id, Decision.verdict, Decision.created_at)
        .where(Decision.head_commit_id == Decision.base_commit_id)
        .where(Decision.created_at.between(since, until))
        .order_by(Decision.created_at, Decision.id)
    )
    return [
        CanaryRow(uuid, series, verdict, created_at)
        for uuid, series, verdict, created_at in session.execute(query)
        if series is not None
    ]


_MEMBER = (Decision.series_id, Series.gpu, Series.kernel, Series.variant)


def _alerts(session: Session, *conditions: ColumnElement[bool]) -> list[AlertRow]:
    rows = session.execute(
        select(*Alert.__table__.columns)
        .where(*conditions)
        .order_by(Alert.opened_at.desc(), Alert.id.desc())
    ).all()
    commits = _commits(session, {r.bad_commit_id for r in rows} | {r.good_commit_id for r in rows})
    members: dict[int, list[Any]] = defaultdict(list)
    for member in session.execute(
        select(Decision.alert_id, *_MEMBER)
        .add_columns(func.count().label("decisions"))
        .add_columns(func.max(Decision.log_ratio).label("worst"))
        .join(Series, Decision.series_id == Series.id)
        .where(Decision.alert_id.in_([row.id for row in rows]))
        .group_by(Decision.alert_id, *_MEMBER)
        .order_by(Decision.series_id)
    ):
        members[member.alert_id].append(member)
    levels = _levels(session, [row.id for row in rows])
    return [
        AlertRow(
            id=row.id,
            family=row.family,
            state=row.state,
            good=commits.get(row.good_commit_id),
            bad=commits[row.bad_commit_id],
            opened_at=row.opened_at,
            closed_at=row.closed_at,
            note=row.note,
            series=tuple(member.series_id for member in members[row.id]),
            decisions=sum(member.decisions for member in members[row.id]),
            gpus=tuple(sorted({member.gpu for member in members[row.id]})),
            worst=max((m.worst for m in members[row.id] if m.worst is not None), default=None),
            kernels=_kernels(members[row.id]),
            levels=levels.get(row.id),
        )
        for row in rows
    ]


def _levels(session: Session, alert_ids: Sequence[int]) -> dict[int, tuple[float, float, str]]:
    """Return the levels before and after the largest difference of each alert, with their unit."""
    query = (
        select(Decision.alert_id, ChangePoint.before, ChangePoint.after, Series.unit)
        .join(ChangePoint, ChangePoint.decision_id == Decision.id)
        .join(Series, Decision.series_id == Series.id)
        .where(Decision.alert_id.in_(alert_ids), Decision.log_ratio.is_(None))
        .order_by(func.abs(ChangePoint.after - ChangePoint.before))
    )
    return {
        row.alert_id: (row.before, row.after, row.unit)
        for row in session.execute(query)
        if row.alert_id is not None
    }


def _kernels(members: Sequence[Any]) -> tuple[str, ...]:
    """Return kernel labels: those with wrong results, then by change, largest first."""
    worst_first = sorted(members, key=lambda m: (m.worst is not None, -(m.worst or 0.0)))
    labels = (f"{m.kernel}[{m.variant}]" if m.variant else m.kernel for m in worst_first)
    return tuple(dict.fromkeys(labels))


def _commits(session: Session, ids: Iterable[int | None]) -> dict[int | None, CommitRow]:
    query = select(Commit.id, *commit_columns())
    rows = session.execute(query.where(Commit.id.in_([i for i in ids if i is not None])))
    return {commit_id: CommitRow(*values) for commit_id, *values in rows}


def _decisions(
    session: Session, *conditions: ColumnElement[bool], order: Sequence[Any]
) -> list[DecisionRow]:
    query = (
        select(
            *columns_of(
                *(DecisionRow, Decision, Series),
                base=_BASE.sha,
                head=Commit.sha,
                head_order=Commit.position,
                shape=Series.parameters,
            )
        )
        .select_from(Decision)
        .join(Series, Decision.series_id == Series.id)
        .join(Commit, Decision.head_commit_id == Commit.id)
        .outerjoin(_BASE, Decision.base_commit_id == _BASE.id)
        .where(*conditions)
        .order_by(*order)
    )
    return rows_of(session, DecisionRow, query)


@dataclass(frozen=True, slots=True)
class NoiseRow:
    """The newest A/A calibration of a series; units and None as in db.tables.Noise."""

    series_id: int
    kernel: str
    variant: str
    stage: str
    cache: str
    operation: str
    parameters: str
    m: int | None
    n: int | None
    k: int | None
    gpu: str
    comparisons: int
    block_sigma: float | None
    placement_sigma: float | None
    comparison_sigma: float | None
    estimate_sigma: float
    noise_floor: float | None
    smallest_step: float | None
    computed_at: datetime


@dataclass(frozen=True, slots=True)
class FalseAlarmRow:
    """False-alarm rate (alarms per canary) at one time, with its interval."""

    since: datetime
    until: datetime
    canaries: int
    alarms: int
    rate: float
    low: float
    high: float
    confidence: float


def aa_calibration(session: Session) -> list[NoiseRow]:
    """Return the newest calibration of every series that has one, by kernel, GPU, shape."""
    query = (
        select(*columns_of(NoiseRow, Noise, Series))
        .join(Series, Noise.series_id == Series.id)
        .where(_is_newest())
        .order_by(*SERIES_ORDER)
    )
    return rows_of(session, NoiseRow, query)


def noise_floors(session: Session, identities: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the noise floor (natural log) of each series identity; 0 if it is unknown."""
    hashes = [series_key(identity) for identity in identities]
    query = (
        select(Series.identity_hash, Noise.noise_floor)
        .join(Series, Noise.series_id == Series.id)
        .where(_is_newest(), Noise.noise_floor.is_not(None), Series.identity_hash.in_(set(hashes)))
    )
    known = {row.identity_hash: row.noise_floor for row in session.execute(query)}
    return [known.get(identity, 0.0) for identity in hashes]


def false_alarm_rates(session: Session, *, limit: int | None = None) -> list[FalseAlarmRow]:
    """Return the live false-alarm rate over time, newest first."""
    newest = (FalseAlarmRate.until.desc(), FalseAlarmRate.id.desc())
    query = select(*columns_of(FalseAlarmRow, FalseAlarmRate)).order_by(*newest).limit(limit)
    return rows_of(session, FalseAlarmRow, query)


def _is_newest() -> ColumnElement[bool]:
    return ~exists().where(
        _LATER.series_id == Noise.series_id,
        or_(
            _LATER.computed_at > Noise.computed_at,
            (_LATER.computed_at == Noise.computed_at) & (_LATER.id > Noise.id),
        ),
    )
