"""Responses of the API's endpoints: plain frozen values, read from the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from db import queries
from db.decisions import OPEN_STATES
from db.engine import Session
from db.errors import NotFoundError
from db.queries import (
    AlertEventRow,
    AlertRow,
    DecisionRow,
    Filters,
    HistoryPoint,
    ResultRow,
    RunSummary,
    SeriesName,
)

MOST, USUAL = 1000, 100  # rows of one answer

Asked = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SeriesList:
    """total: how many pass the filters, beyond this page of them."""

    total: int
    series: tuple[SeriesName, ...]


@dataclass(frozen=True, slots=True)
class SeriesHistory:
    """points: accepted results, oldest commit first by ancestry; times in microseconds, what a
    series of another metric measured in its `unit`."""

    series: SeriesName
    points: tuple[HistoryPoint, ...]


@dataclass(frozen=True, slots=True)
class AlertList:
    total: int
    alerts: tuple[AlertRow, ...]


@dataclass(frozen=True, slots=True)
class AlertDetail:
    """decisions: its members, the slowest first."""

    alert: AlertRow
    decisions: tuple[DecisionRow, ...]
    events: tuple[AlertEventRow, ...]


@dataclass(frozen=True, slots=True)
class RunList:
    runs: tuple[RunSummary, ...]


@dataclass(frozen=True, slots=True)
class RunDetail:
    """missing: keys of planned cases without a result."""

    run: RunSummary
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResultList:
    """The newest accepted result of each series; times in microseconds.

    Of one project, as a result does not name its own: this repository's, or, where nothing of it
    was timed, the first by name that was measured here.
    """

    total: int
    regime: str
    results: tuple[ResultRow, ...]


@dataclass(frozen=True, slots=True)
class Status:
    """Overview of the database. newest_result_at null: nothing was measured yet."""

    suites: tuple[str, ...]
    gpus: tuple[str, ...]
    newest_result_at: datetime | None
    open_alerts: int


def status(session: Session, asked: Asked) -> Status:
    return Status(
        queries.suite_names(session),
        queries.gpu_names(session),
        queries.newest_result_at(session),
        len(queries.alerts(session, states=OPEN_STATES)),
    )


def series_list(session: Session, asked: Asked) -> SeriesList:
    wanted = {name: asked[name] for name in ("kernel", "variant", "gpu", "stage") if name in asked}
    wanted |= {name: asked[name] for name in ("m", "n", "k") if name in asked}
    found = [
        one
        for one in queries.series_names(session)
        if all(getattr(one, name) == value for name, value in wanted.items())
    ]
    return SeriesList(len(found), tuple(_page(found, asked)))


def series_history(session: Session, asked: Asked) -> SeriesHistory:
    known = {one.id: one for one in queries.series_names(session)}
    one = known.get(asked["id"])
    if one is None:
        raise NotFoundError(f"no series {asked['id']}: /v1/series lists them")
    points = queries.series_history(session, one.id)
    return SeriesHistory(one, tuple(points[-asked.get("limit", USUAL) :]))


def alert_list(session: Session, asked: Asked) -> AlertList:
    state = asked.get("state", "open")
    states: tuple[str, ...] = () if state == "all" else (state,)
    found = queries.alerts(session, states=OPEN_STATES if state == "open" else states)
    return AlertList(len(found), tuple(_page(found, asked)))


def alert_detail(session: Session, asked: Asked) -> AlertDetail:
    return AlertDetail(
        queries.alert_by_id(session, asked["id"]),
        tuple(queries.alert_decisions(session, asked["id"])),
        tuple(queries.alert_events(session, asked["id"])),
    )


def run_list(session: Session, asked: Asked) -> RunList:
    narrowed = {name: asked[name] for name in ("suite", "status", "gpu") if name in asked}
    return RunList(tuple(queries.runs(session, **narrowed, limit=asked.get("limit", 20))))


def run_detail(session: Session, asked: Asked) -> RunDetail:
    run = queries.run_by_uuid_prefix(session, asked["uuid"])
    return RunDetail(run, queries.missing_cases(session, run.uuid))


def latest_results(session: Session, asked: Asked) -> ResultList:
    filters = Filters(
        kernels=_one(asked, "kernel"), gpus=_one(asked, "gpu"), stages=_one(asked, "stage"),
        m=_one(asked, "m"), suites=_one(asked, "suite"),
        without_triggers=() if asked.get("sweeps") else (queries.SWEEP,),
        projects=(queries.main_project(session),),
    )  # fmt: skip
    regime = asked.get("regime", "boost")
    found = queries.latest_results(session, filters, regime=regime)
    return ResultList(len(found), regime, tuple(_page(found, asked)))


def run_results(session: Session, asked: Asked) -> ResultList:
    run = queries.run_by_uuid_prefix(session, asked["uuid"])
    found = queries.run_results(session, run.uuid)
    return ResultList(len(found), "", tuple(_page(found, asked)))


def _one(asked: Asked, name: str) -> tuple[Any, ...]:
    return (asked[name],) if name in asked else ()


def _page(rows: Any, asked: Asked) -> Any:
    start = asked.get("offset", 0)
    return rows[start : start + asked.get("limit", USUAL)]
