"""Changes of kernel times since last week and since the last release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from flexq_bench.dashboard.database import command_on, file_identity
from flexq_bench.dashboard.shared.controls import Controls
from flexq_bench.dashboard.shared.formatting import as_text, stage_in_words, time_zone
from flexq_bench.dashboard.shared.noise import stored_noise
from flexq_bench.dashboard.shared.project import project_title
from flexq_bench.dashboard.shared.static_table import draw_static_table, image, link, number
from flexq_bench.dashboard.views.home.tables import change_rows, score_rows
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.queries import AlertRow, ReleaseRow, SeriesName
from flexq_bench.results.scoreboard import BoardRow, CaseChange, board_rows, case_changes
from flexq_bench.results.stored_noise import StoredNoise
from flexq_bench.verdicts import Verdict
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.probes import is_probe

Compared = tuple[list[BoardRow], list[CaseChange]]

_METRIC = "time"  # in regime boost; sustained times are another metric
_MAX_CASES = 10  # cases of each direction
_ANY = "all"
_OPTIONAL = ("release", "alert", "commits")
_PERCENT = number("{:+.2f} %")
_FORMATS = {
    **dict.fromkeys(("last week", "release", "change"), _PERCENT),
    "µs": number("{:.2f}"),
    "trend": image("times over the latest ones; higher is slower"),
    "alert": link(r"alert=(.*)$"),
    **{name: link(name) for name in ("history", "samples")},
    "run": link(r"run=(.*)$"),
    "commits": link("compare"),
}


def show_trend(database: Database, project: str, alerts: Sequence[AlertRow]) -> None:
    """Show a summary, all kernels, and the cases that changed. alerts: the open ones."""
    with database.session() as session:
        known = [
            series
            for series in queries.series_names(session)
            if series.metric == _METRIC
            and series.project == project
            and series.backend != queries.EXTERNAL_BACKEND
            and not is_probe(series.kernel)
        ]
    if not known:
        st.caption(
            f"{as_text(project_title(project))} has no timed kernel here: "
            f"{command_on(database, 'run', 'smoke')}"
        )
        return
    controls = Controls("home")
    on_top = st.empty()
    chosen, release = _narrow(controls, database, known, project)
    zone = time_zone(st.context.timezone)
    noise = stored_noise(database, [series.id for series in chosen])
    order = None if release is None else release.topo_order
    rows, changes = _compared(database, chosen, noise, order)
    controls.warn_of_ignored(on_top, "Not stored, so ignored")
    controls.offer_to_clear()
    if not rows:
        _say_nothing_accepted(database, [series.id for series in chosen])
        return
    _show_summary(rows)
    _table("Kernels", score_rows(_worst_first(rows), alerts, zone))
    st.caption(
        "Latest results of each kernel over those of the same cases a week before"
        + ("" if release is None else f", and at release {as_text(release.name)}")
        + ": geometric means of times, regime boost; above 0 % is slower. 95 % intervals include "
        "run-to-run noise. Only the newest 30 results of a case are used: there is nothing to "
        "compare if none of them is old enough, or if the environment changed in between. The "
        "trend is of the newest runs; its band is the uncertainty of one run."
    )
    _show_cases(changes)


def _compared(
    database: Database, chosen: Sequence[SeriesName], noise: StoredNoise, order: int | None
) -> Compared:
    """Compare kernels and cases with last week; of a SQLite file once after each commit."""
    version = database.version()
    if version is None:
        return _compare(chosen, noise, order)
    ids = " ".join(str(series.id) for series in chosen)
    return _compared_in_file(chosen, noise, file_identity(database.path), version, ids, order)


@st.cache_resource(show_spinner=False, max_entries=8)
def _compared_in_file(
    _chosen: Sequence[SeriesName],
    _noise: StoredNoise,
    file: tuple[int, int] | None,
    version: int,
    ids: str,
    order: int | None,
) -> Compared:
    return _compare(_chosen, _noise, order)


def _compare(chosen: Sequence[SeriesName], noise: StoredNoise, order: int | None) -> Compared:
    rows = board_rows(chosen, noise, release_order=order)
    return rows, case_changes(chosen, noise, verdicts=(Verdict.SLOWER, Verdict.FASTER))


def _say_nothing_accepted(database: Database, series: Sequence[int]) -> None:
    with database.session() as session:
        measured = queries.measured_series(session, series)
    if measured:
        st.info("No accepted result of a suite passes these filters: widen them.")
    else:
        st.caption(
            "These kernels were compared, but no run of a suite measured them: "
            f"{command_on(database, 'run', 'smoke')}"
        )


def _narrow(
    controls: Controls, database: Database, known: Sequence[SeriesName], project: str
) -> tuple[list[SeriesName], ReleaseRow | None]:
    """Select series and release; CPUs are shown only if selected, or if there is no GPU."""
    with database.session() as session:
        gpus = [gpu for gpu in queries.gpu_names(session) if gpu in {s.gpu for s in known}]
        stored = queries.releases(session, project=project)
        releases = [row for row in stored if row.topo_order is not None]
    cuda_skus = {s.gpu for s in known if s.backend == "cuda"}
    gpu = controls.select(st.sidebar, "gpu", "GPU", [_ANY, *gpus], _ANY)
    stages = sorted({s.stage for s in known})
    stage = controls.select(st.sidebar, "stage", "Stage", stages, format_func=stage_in_words)
    caches = sorted({s.cache for s in known})
    cache = controls.select(st.sidebar, "cache", "Cache", caches)
    labels = sorted({kernel_label(s.kernel, s.variant) for s in known})
    selected = controls.multiselect(st.sidebar, "kernel", "Kernel", labels)
    release = None
    if releases:
        release = controls.select(
            st.sidebar, "release", "Release", releases,
            format_func=lambda row: row.name, to_url=lambda row: row.name,
        )  # fmt: skip
    chosen = [
        s
        for s in known
        if (s.gpu == gpu or (gpu == _ANY and (s.gpu in cuda_skus or not cuda_skus)))
        and (s.stage, s.cache) == (stage, cache)
        and (not selected or kernel_label(s.kernel, s.variant) in selected)
    ]
    return chosen, release


def _show_summary(rows: Sequence[BoardRow]) -> None:
    """Show the number of kernels that changed."""
    compared = [row.week for row in rows if row.week is not None]
    verdicts = [change.verdict for change in compared]
    places = st.columns(3)
    places[0].metric("slower than last week", verdicts.count(Verdict.SLOWER))
    places[1].metric("faster than last week", verdicts.count(Verdict.FASTER))
    places[2].metric("compared, of all rows", f"{len(compared)} of {len(rows)}")


def _worst_first(rows: Sequence[BoardRow]) -> list[BoardRow]:
    """Sort rows: slower and faster by size of the change, then unclear, same, not comparable."""
    order = (Verdict.SLOWER, Verdict.FASTER, Verdict.AMBIGUOUS, Verdict.SAME)

    def key(row: BoardRow) -> tuple[int, float, str, str]:
        if row.week is None:
            return len(order), 0.0, row.label, row.gpu
        size = abs(row.week.ratio.estimate - 1)
        return order.index(row.week.verdict), -size, row.label, row.gpu

    return sorted(rows, key=key)


def _show_cases(changes: Sequence[CaseChange]) -> None:
    for title, verdict in (
        ("Regressions since last week", Verdict.SLOWER),
        ("Improvements since last week", Verdict.FASTER),
    ):
        matching = [change for change in changes if change.change.verdict is verdict]
        if not matching:
            continue
        _table(title, change_rows(matching[:_MAX_CASES]))
        if len(matching) > _MAX_CASES:
            st.caption(f"The {_MAX_CASES} largest of {len(matching)}.")


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Show rows below a title, without columns of changes and links that have no value."""
    st.subheader(title, anchor=False)
    empty = [name for name in _OPTIONAL if all(row.get(name) is None for row in rows)]
    if "release" in empty:
        empty.append("95 % interval, release")
    kept = [{name: value for name, value in row.items() if name not in empty} for row in rows]
    draw_static_table(kept, title, _FORMATS)
