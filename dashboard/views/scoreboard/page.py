"""Scoreboard: what got slower or faster since last week and since the last release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard.database import current_database, errors_shown, show_empty_database
from dashboard.shared.controls import Controls
from dashboard.shared.formatting import as_code, as_text, stage_in_words, zone_named
from dashboard.shared.freshness import show_freshness
from dashboard.shared.tables import draw_table
from dashboard.views.scoreboard.tables import change_rows, coverage_rows, score_rows
from db import queries
from db.decisions import OPEN_STATES
from db.engine import Database
from db.queries import SCHEDULED, AlertRow, ReleaseRow, SeriesName
from flexq_bench.runs import command_lines
from flexq_bench.runs.scoreboard import BoardRow, CaseChange, board_rows, case_changes
from flexq_bench.runs.stored_noise import StoredNoise, read_noise
from flexq_bench.verdicts import Verdict
from workloads.case import kernel_label
from workloads.probes import is_probe

_METRIC = "time"  # in regime boost; sustained times are another metric
_LISTED = 10  # cases of each direction
_ANY = "all"


def as_page() -> st.Page:
    """Return the `st.Page` of this view, the app's default page."""
    return st.Page(page, title="Scoreboard", icon=":material/scoreboard:", default=True)


def page() -> None:
    """News first, then every kernel, then what the last scheduled runs cover."""
    st.title("Scoreboard")
    with errors_shown():
        database = current_database()
        with database.session() as session:
            project = queries.main_project(session)
            known = [
                one
                for one in queries.series_names(session)
                if one.metric == _METRIC
                and one.project == project
                and one.backend != queries.OUTSIDE
                and not is_probe(one.kernel)
            ]
        if not known:
            show_empty_database(database)
            return
        show_freshness(database)
        _show(database, known, project)


def _show(database: Database, known: Sequence[SeriesName], project: str) -> None:
    controls = Controls("scoreboard")
    on_top = st.empty()
    chosen, release = _narrow(controls, database, known, project)
    zone = zone_named(st.context.timezone)
    with database.session() as session:
        noise = read_noise(session, [one.id for one in chosen])
        alerts = queries.alerts(session, states=OPEN_STATES)
        nightly = queries.latest_runs(session, trigger=SCHEDULED, backend="cuda", project=project)
    order = None if release is None else release.topo_order
    rows = board_rows(chosen, noise, release_order=order)
    controls.warn_of_ignored(on_top, "Not stored, so not asked for")
    controls.offer_to_clear()
    if not rows:
        st.info("No accepted result of a suite passes these filters: widen them.")
        return
    _show_news(rows, alerts)
    _table("Kernels", score_rows(_worst_first(rows), alerts, zone), "scores", release)
    st.caption(
        "Latest results of each kernel over those of the same cases a week before"
        + ("" if release is None else f", and at release {as_text(release.name)}")
        + ": geometric means of times, regime boost; above 0 % is slower. 95 % intervals hold the "
        "noise from run to run. The newest 30 results of a case are looked at: there is nothing to "
        "compare where none of them is old enough, or where the environment changed meanwhile. The "
        "trend is of the newest runs, its band what one run is known to."
    )
    _show_cases(chosen, noise)
    _show_coverage(coverage_rows(nightly, zone), database)


def _narrow(
    controls: Controls, database: Database, known: Sequence[SeriesName], project: str
) -> tuple[list[SeriesName], ReleaseRow | None]:
    """The series to look at, and the release; CPUs only where there is no GPU, or by request."""
    with database.session() as session:
        gpus = [gpu for gpu in queries.gpu_names(session) if gpu in {one.gpu for one in known}]
        stored = queries.releases(session, project=project)
        releases = [one for one in stored if one.topo_order is not None]
    on_gpus = {one.gpu for one in known if one.backend == "cuda"}
    gpu = controls.one(st.sidebar, "gpu", "GPU", [_ANY, *gpus], _ANY)
    stages = sorted({one.stage for one in known})
    stage = controls.one(st.sidebar, "stage", "Stage", stages, stages[0], shown=stage_in_words)
    caches = sorted({one.cache for one in known})
    cache = controls.one(st.sidebar, "cache", "Cache", caches, caches[0])
    labels = sorted({kernel_label(one.kernel, one.variant) for one in known})
    wanted = controls.many(st.sidebar, "kernel", "Kernel", labels)
    release = None
    if releases:
        release = controls.one(
            st.sidebar, "release", "Release", releases, releases[0],
            shown=lambda one: one.name, written=lambda one: one.name,
        )  # fmt: skip
    chosen = [
        one
        for one in known
        if (one.gpu == gpu or (gpu == _ANY and (one.gpu in on_gpus or not on_gpus)))
        and (one.stage, one.cache) == (stage, cache)
        and (not wanted or kernel_label(one.kernel, one.variant) in wanted)
    ]
    return chosen, release


def _show_news(rows: Sequence[BoardRow], alerts: Sequence[AlertRow]) -> None:
    """Show the number of kernels that changed, and the number of open alerts."""
    compared = [row.week for row in rows if row.week is not None]
    verdicts = [change.verdict for change in compared]
    places = st.columns(4)
    places[0].metric("slower than last week", verdicts.count(Verdict.SLOWER))
    places[1].metric("faster than last week", verdicts.count(Verdict.FASTER))
    places[2].metric("compared, of all rows", f"{len(compared)} of {len(rows)}")
    places[3].metric("open alerts", len(alerts))


def _worst_first(rows: Sequence[BoardRow]) -> list[BoardRow]:
    """Slower, then faster, each by size; then unclear, the same, and what can't be compared."""
    order = (Verdict.SLOWER, Verdict.FASTER, Verdict.AMBIGUOUS, Verdict.SAME)

    def key(row: BoardRow) -> tuple[int, float, str, str]:
        if row.week is None:
            return len(order), 0.0, row.label, row.gpu
        size = abs(row.week.ratio.estimate - 1)
        return order.index(row.week.verdict), -size, row.label, row.gpu

    return sorted(rows, key=key)


def _show_cases(chosen: Sequence[SeriesName], noise: StoredNoise) -> None:
    changes = case_changes(chosen, noise)
    for title, verdict, key in (
        ("Regressions since last week", Verdict.SLOWER, "regressions"),
        ("Improvements since last week", Verdict.FASTER, "improvements"),
    ):
        found: list[CaseChange] = [one for one in changes if one.change.verdict is verdict]
        st.header(title, anchor=False)
        if not found:
            st.caption(f"No case is {verdict.value} beyond 1 % and beyond the noise of its runs.")
            continue
        _dataframe(change_rows(found[:_LISTED]), key)
        if len(found) > _LISTED:
            st.caption(f"The {_LISTED} largest of {len(found)}.")


def _show_coverage(rows: list[dict[str, Any]], database: Database) -> None:
    st.header("Coverage of the last scheduled run", anchor=False)
    if not rows:
        nightly = command_lines.command("nightly", *command_lines.database_arguments(database))
        st.caption(f"No run on a GPU was scheduled yet: {as_code(nightly)}")
        return
    _dataframe(rows, "coverage")


def _table(title: str, rows: list[dict[str, Any]], key: str, release: ReleaseRow | None) -> None:
    st.header(title, anchor=False)
    if release is None:
        rows = [{n: v for n, v in row.items() if "release" not in n} for row in rows]
    _dataframe(rows, key)


def _dataframe(rows: list[dict[str, Any]], key: str) -> None:
    column = st.column_config
    percent = column.NumberColumn(format="%+.2f %%")
    frame = pd.DataFrame(rows)
    for name in ("alert", "commits"):
        if name in frame and frame[name].isna().all():
            frame = frame.drop(columns=name)
    draw_table(
        frame,
        column_config={
            "kernel": column.TextColumn(pinned=True),
            "last week": percent,
            "release": percent,
            "change": percent,
            "µs": column.NumberColumn(format="%.2f"),
            "trend": column.ImageColumn(help="times over the latest ones; higher is slower"),
            "covered": column.ProgressColumn(
                format="%.0f %%", min_value=0, max_value=100, color="blue"
            ),
            "alert": column.LinkColumn(display_text=r"alert=(.*)$", help="the open alert"),
            "history": column.LinkColumn(display_text="history"),
            "samples": column.LinkColumn(display_text="samples"),
            "run": column.LinkColumn(display_text=r"run=(.*)$", help="all results of the run"),
            "commits": column.LinkColumn(display_text="compare", help="the two commits"),
        },
        key=key,
    )
