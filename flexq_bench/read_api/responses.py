"""Responses of the API's endpoints: frozen dataclasses, read from the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from flexq_bench.db import queries
from flexq_bench.db.decisions import OPEN_STATES
from flexq_bench.db.engine import Session
from flexq_bench.db.errors import NotFoundError
from flexq_bench.db.queries import (
    AlertEventRow,
    AlertRow,
    DecisionRow,
    Filters,
    HistoryPoint,
    NightState,
    ResultRow,
    RunSummary,
    SeriesName,
)

MAX_LIMIT, DEFAULT_LIMIT = 1000, 100  # rows per response

Parameters = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SeriesList:
    """total: number of matching series, of which this is one page."""

    total: int
    series: tuple[SeriesName, ...]


@dataclass(frozen=True, slots=True)
class SeriesHistory:
    """points: accepted results at the commits of a branch, oldest first by ancestry.

    Times are in microseconds, other metrics in the `unit` of the series.
    """

    series: SeriesName
    points: tuple[HistoryPoint, ...]


@dataclass(frozen=True, slots=True)
class AlertList:
    total: int
    alerts: tuple[AlertRow, ...]


@dataclass(frozen=True, slots=True)
class AlertDetail:
    """decisions: of this alert, slowest first."""

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
class NightList:
    """Nightly runs on each kind of GPU, latest first. report: empty until it is judged."""

    total: int
    nights: tuple[NightState, ...]


@dataclass(frozen=True, slots=True)
class ResultList:
    """The newest accepted result of each series; times in microseconds.

    All results are of one project: this repository, or, if it has no timed result, the first
    project by name that was measured here.
    """

    total: int
    regime: str
    results: tuple[ResultRow, ...]


@dataclass(frozen=True, slots=True)
class Status:
    """Overview of the database. newest_result_at null: no result yet."""

    suites: tuple[str, ...]
    gpus: tuple[str, ...]
    newest_result_at: datetime | None
    open_alerts: int


def status(session: Session, parameters: Parameters) -> Status:
    return Status(
        queries.suite_names(session),
        queries.gpu_names(session),
        queries.newest_result_at(session),
        len(queries.alerts(session, states=OPEN_STATES)),
    )


def series_list(session: Session, parameters: Parameters) -> SeriesList:
    names = ("kernel", "variant", "gpu", "stage", "operation", "parameters", "m", "n", "k")
    filters = {name: parameters[name] for name in names if name in parameters}
    matching = [
        series
        for series in queries.series_names(session)
        if all(getattr(series, name) == value for name, value in filters.items())
    ]
    return SeriesList(len(matching), tuple(_page(matching, parameters)))


def series_history(session: Session, parameters: Parameters) -> SeriesHistory:
    by_id = {series.id: series for series in queries.series_names(session)}
    series = by_id.get(parameters["id"])
    if series is None:
        raise NotFoundError(f"no series {parameters['id']}: /v1/series lists them")
    points = queries.series_history(session, series.id, branch=parameters.get("branch"))
    return SeriesHistory(series, tuple(points[-parameters.get("limit", DEFAULT_LIMIT) :]))


def alert_list(session: Session, parameters: Parameters) -> AlertList:
    state = parameters.get("state", "open")
    states: tuple[str, ...] = () if state == "all" else (state,)
    alerts = queries.alerts(session, states=OPEN_STATES if state == "open" else states)
    return AlertList(len(alerts), tuple(_page(alerts, parameters)))


def alert_detail(session: Session, parameters: Parameters) -> AlertDetail:
    return AlertDetail(
        queries.alert_by_id(session, parameters["id"]),
        tuple(queries.alert_decisions(session, parameters["id"])),
        tuple(queries.alert_events(session, parameters["id"])),
    )


def run_list(session: Session, parameters: Parameters) -> RunList:
    filters = {name: parameters[name] for name in ("suite", "status", "gpu") if name in parameters}
    return RunList(tuple(queries.runs(session, **filters, limit=parameters.get("limit", 20))))


def run_detail(session: Session, parameters: Parameters) -> RunDetail:
    run = queries.run_by_uuid_prefix(session, parameters["uuid"])
    return RunDetail(run, queries.missing_cases(session, run.uuid))


def night_list(session: Session, parameters: Parameters) -> NightList:
    filters = {name: parameters[name] for name in ("suite", "state", "name") if name in parameters}
    nights = [
        night
        for night in queries.night_states(session, **filters)
        if parameters.get("gpu") in (None, night.gpu)
    ]
    return NightList(len(nights), tuple(_page(nights, parameters)))


def latest_results(session: Session, parameters: Parameters) -> ResultList:
    filters = Filters(
        kernels=_values_of(parameters, "kernel"),
        gpus=_values_of(parameters, "gpu"),
        stages=_values_of(parameters, "stage"),
        operations=_values_of(parameters, "operation"),
        m=_values_of(parameters, "m"), suites=_values_of(parameters, "suite"),
        without_triggers=() if parameters.get("sweeps") else (queries.SWEEP,),
        projects=(queries.main_project(session),),
    )  # fmt: skip
    regime = parameters.get("regime", "boost")
    results = queries.latest_results(session, filters, regime=regime)
    return ResultList(len(results), regime, tuple(_page(results, parameters)))


def run_results(session: Session, parameters: Parameters) -> ResultList:
    run = queries.run_by_uuid_prefix(session, parameters["uuid"])
    results = queries.run_results(session, run.uuid)
    return ResultList(len(results), "", tuple(_page(results, parameters)))


def _values_of(parameters: Parameters, name: str) -> tuple[Any, ...]:
    return (parameters[name],) if name in parameters else ()


def _page(rows: Any, parameters: Parameters) -> Any:
    start = parameters.get("offset", 0)
    return rows[start : start + parameters.get("limit", DEFAULT_LIMIT)]
