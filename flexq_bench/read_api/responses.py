"""Responses of the API's endpoints: frozen dataclasses, read from the database."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from flexq_bench.db import queries
from flexq_bench.db.decisions import OPEN_STATES
from flexq_bench.db.engine import Session
from flexq_bench.db.errors import NotFoundError
from flexq_bench.db.queries import (
    AlertEventRow,
    AlertRow,
    CountRuns,
    DecisionRow,
    Filters,
    HistoryPoint,
    NightState,
    Page,
    ResultRow,
    RunSummary,
    SeriesName,
)

MAX_LIMIT, DEFAULT_LIMIT = 1000, 100  # rows per response

Parameters = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """Source of responses. repository: git tree for names of branches; None: only commits.

    count_runs: counts the results of runs; None: by reading them.
    """

    session: Session
    repository: Path | None = None
    count_runs: CountRuns | None = None


@dataclass(frozen=True, slots=True)
class SeriesList:
    """total: number of matching series, of which this is one page. next: as `after`, the next one.

    It is null on the last page, as in all lists.
    """

    total: int
    series: tuple[SeriesName, ...]
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedPoint(HistoryPoint):
    """A point with its value and interval in the `unit` of the series; see StatedResult."""

    value: float | None
    value_low: float | None
    value_high: float | None
    median_us: float | None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedResult(ResultRow):
    """A result with its value and interval in its `unit`.

    Fields in microseconds, whose names end in `_us`, are null for another unit.
    """

    value: float | None
    value_low: float | None
    value_high: float | None


@dataclass(frozen=True, slots=True)
class SeriesHistory:
    """points: accepted results at the commits of a branch, oldest first by ancestry."""

    series: SeriesName
    points: tuple[StatedPoint, ...]


@dataclass(frozen=True, slots=True)
class AlertList:
    total: int
    alerts: tuple[AlertRow, ...]
    next: int | None


@dataclass(frozen=True, slots=True)
class AlertDetail:
    """decisions: a page of this alert's, wrong results and slowest first. next: uuid."""

    alert: AlertRow
    decisions: tuple[DecisionRow, ...]
    events: tuple[AlertEventRow, ...]
    next: str | None


@dataclass(frozen=True, slots=True)
class RunList:
    total: int
    runs: tuple[RunSummary, ...]
    next: str | None


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
    next: str | None


@dataclass(frozen=True, slots=True)
class ResultList:
    """Results. regime: empty: any."""

    total: int
    regime: str
    results: tuple[StatedResult, ...]
    next: int | str | None


@dataclass(frozen=True, slots=True)
class Status:
    """Overview of the database. newest_result_at null: no result yet."""

    suites: tuple[str, ...]
    gpus: tuple[str, ...]
    newest_result_at: datetime | None
    open_alerts: int


@dataclass(frozen=True, slots=True)
class Health:
    status: str


def health(source: Source, parameters: Parameters) -> Health:
    queries.rows_stored(source.session)
    return Health("ok")


def status(source: Source, parameters: Parameters) -> Status:
    return Status(
        queries.suite_names(source.session),
        queries.gpu_names(source.session),
        queries.newest_result_at(source.session),
        queries.count_alerts(source.session, states=OPEN_STATES),
    )


def series_list(source: Source, parameters: Parameters) -> SeriesList:
    filters = _filters(source, parameters)
    page = _page(parameters)
    rows, total = queries.series_page(source.session, filters, page)
    return SeriesList(total, *_cut(rows, page, lambda row: row.id))


def series_history(source: Source, parameters: Parameters) -> SeriesHistory:
    series = queries.series_name(source.session, parameters["id"])
    if series is None:
        raise NotFoundError(f"no series {parameters['id']}: /v1/series lists them")
    points = queries.series_history(source.session, series.id, branch=parameters.get("branch"))
    since, until = parameters.get("since"), parameters.get("until")
    within = [
        point
        for point in points
        if (since is None or point.created_at >= since)
        and (until is None or point.created_at <= until)
    ]
    chosen = within[-parameters.get("limit", DEFAULT_LIMIT) :]
    return SeriesHistory(series, tuple(_stated(p, StatedPoint, series.unit) for p in chosen))


def alert_list(source: Source, parameters: Parameters) -> AlertList:
    state = parameters.get("state", "open")
    states = OPEN_STATES if state == "open" else () if state == "all" else (state,)
    page = _page(parameters)
    rows, total = queries.alerts_page(
        source.session, _filters(source, parameters), page, states=states
    )
    return AlertList(total, *_cut(rows, page, lambda row: row.id))


def alert_detail(source: Source, parameters: Parameters) -> AlertDetail:
    alert = queries.alert_by_id(source.session, parameters["id"])
    page = _page(parameters)
    rows = queries.alert_decisions_page(source.session, alert.id, page)
    decisions, following = _cut(rows, page, lambda row: row.uuid)
    events = tuple(queries.alert_events(source.session, alert.id))
    return AlertDetail(alert, decisions, events, following)


def run_list(source: Source, parameters: Parameters) -> RunList:
    filters = _filters(source, parameters)
    page = _page({"limit": 20, **parameters})
    rows, total = queries.runs_page(
        source.session, filters, page, gpus=filters.gpus, count=source.count_runs
    )
    return RunList(total, *_cut(rows, page, lambda row: row.uuid))


def run_detail(source: Source, parameters: Parameters) -> RunDetail:
    uuid = queries.run_uuid_of(source.session, parameters["uuid"])
    (run,) = queries.runs_by_uuid(source.session, [uuid], count=source.count_runs)
    return RunDetail(run, queries.missing_cases(source.session, uuid) if run.missing else ())


def run_results(source: Source, parameters: Parameters) -> ResultList:
    uuid = queries.run_uuid_of(source.session, parameters["uuid"])
    filters = _filters(source, parameters)
    page = _page(parameters)
    rows, total = queries.run_results_page(
        source.session, uuid, filters, page, counted=filters != Filters()
    )
    if total is None:
        (run,) = queries.runs_by_uuid(source.session, [uuid], count=source.count_runs)
        total = run.received
    results, following = _cut(rows, page, lambda row: row.uuid)
    stated = tuple(_stated(row, StatedResult, row.unit) for row in results)
    return ResultList(total, "", stated, following)


def night_list(source: Source, parameters: Parameters) -> NightList:
    page = _page(parameters)
    rows, total = queries.nights_page(
        source.session,
        _filters(source, parameters),
        page,
        names=parameters.get("name", ()),
        states=parameters.get("state", ()),
    )
    return NightList(total, *_cut(rows, page, lambda row: row.key))


def latest_results(source: Source, parameters: Parameters) -> ResultList:
    filters = _filters(source, parameters)
    if not parameters.get("sweeps"):
        filters = replace(filters, without_triggers=(queries.SWEEP,))
    if not filters.projects:
        main = queries.main_project(source.session)
        if main or main in queries.stored_texts(source.session, "project"):
            filters = replace(filters, projects=(main,))
    regime = parameters.get("regime", "boost")
    page = _page(parameters)
    rows, total = queries.latest_results_page(source.session, filters, page, regime=regime)
    results, following = _cut(rows, page, lambda row: row.series_id)
    stated = tuple(_stated(row, StatedResult, row.unit) for row in results)
    return ResultList(total, regime, stated, following)


def _stated(row: HistoryPoint | ResultRow, kind: Callable[..., T], unit: str) -> T:
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    value, low, high = row.median_us, row.ci_low_us, row.ci_high_us
    if unit != "us":
        values |= {name: None for name in values if name.endswith("_us")}
    return kind(**values, value=value, value_low=low, value_high=high)


# Parameters by the fields of filters.
_TEXT_FILTERS = {
    "kernels": "kernel",
    "variants": "variant",
    "gpus": "gpu",
    "stages": "stage",
    "operations": "operation",
    "parameters": "parameters",
    "metrics": "metric",
    "projects": "project",
    "suites": "suite",
    "statuses": "status",
}


def _filters(source: Source, parameters: Parameters) -> Filters:
    values: dict[str, Any] = {
        field: _matching(source.session, name, parameters[name])
        for field, name in _TEXT_FILTERS.items()
        if name in parameters
    }
    same = ("m", "n", "k", "since", "until")
    return Filters(**values, **{name: parameters[name] for name in same if name in parameters})


def _matching(session: Session, name: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the texts and the stored values that patterns with * or ? match.

    A pattern that matches none is returned as a text, which is not stored either.
    """
    chosen = dict.fromkeys(patterns)
    globs = [re.sub(r"\[", "[[]", text) for text in patterns if "*" in text or "?" in text]
    if globs:
        stored = queries.stored_texts(session, name)
        chosen |= {text: None for text in stored for glob in globs if fnmatchcase(text, glob)}
    return tuple(chosen)


def _page(parameters: Parameters) -> Page:
    """Return the requested page with one more row, which says whether there is a next one."""
    limit = parameters.get("limit", DEFAULT_LIMIT)
    return Page(limit + 1, parameters.get("after"), parameters.get("offset", 0))


def _cut(rows: Sequence[T], page: Page, identity: Callable[[T], Any]) -> tuple[tuple[T, ...], Any]:
    """Return the rows of a page, and the identity of the last one if there is a next page."""
    shown = tuple(rows[: page.limit - 1])
    return shown, identity(shown[-1]) if len(rows) > len(shown) else None
