"""History: series over commits."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import tzinfo

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from flexq_bench.dashboard.database import command_on, show_empty_database
from flexq_bench.dashboard.pages import PERFORMANCE, app_page
from flexq_bench.dashboard.shared import history_chart
from flexq_bench.dashboard.shared.charts import draw_chart
from flexq_bench.dashboard.shared.colors import kernel_styles
from flexq_bench.dashboard.shared.controls import Controls, page_controls
from flexq_bench.dashboard.shared.formatting import as_text, short_commit, time_zone
from flexq_bench.dashboard.shared.history_frame import history_frame
from flexq_bench.dashboard.shared.links import page_address
from flexq_bench.dashboard.shared.model_places import places_in_models
from flexq_bench.dashboard.shared.tables import draw_table
from flexq_bench.dashboard.views.history.patterns import MAX_RESULTS, pattern_frame
from flexq_bench.dashboard.views.measurement import page as measurement
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.queries import HistoryPoint, ReleaseRow, SeriesName
from flexq_bench.db.records import LINEAR
from flexq_bench.results.paired_questions import WORSE, paired_verdicts
from flexq_bench.results.series_breaks import series_breaks
from flexq_bench.verdicts import history_verdict
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.operation import natural_order
from flexq_bench.workloads.probes import is_probe

_FILTERS = {  # field (also its name in the URL) -> label
    "project": "Project",
    "kernel": "Kernel",
    "variant": "Variant",
    "operation": "Operation",
    "m": "M (tokens)",
    "gpu": "GPU",
    "stage": "Stage",
    "cache": "Cache",
}
_MAX_SERIES = 6  # series in one chart: the number of dash styles, and quick to draw
_TIME = "time"
_MAX_COMMITS = 50  # commits in the table by default, to send fewer bytes
_BY_COMMIT, _BY_DATE = "commits", "dates"
_ABSOLUTE, _OF_FLOOR, _RELATIVE = "absolute", "% of read", "relative to a release"


@app_page("History", section=PERFORMANCE, icon=":material/show_chart:")
def page(database: Database) -> None:
    """Show the history of the selected series."""
    with database.session() as session:
        stored = [s for s in queries.series_names(session) if not is_probe(s.kernel)]
    if not stored:
        show_empty_database(database)
        return
    with page_controls("history", "Not among the stored series, so ignored") as controls:
        drawn = _show(controls, database, stored)
    if drawn is not None:
        _show_patterns(drawn)
        _show_points(drawn, time_zone(st.context.timezone))


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Contents of the chart. value: the quantity of its values, with their unit."""

    frame: pd.DataFrame
    value: str
    histories: Mapping[SeriesName, Sequence[HistoryPoint]]


def _show(controls: Controls, database: Database, stored: Sequence[SeriesName]) -> _Drawn | None:
    """Show the controls and the chart; None: nothing is drawn, and a message gives the reason."""
    metrics = sorted({series.metric for series in stored})
    default = _TIME if _TIME in metrics else metrics[0]
    metric = controls.select(st.sidebar, "metric", "Metric", metrics, default)
    chosen = _narrow(controls, [series for series in stored if series.metric == metric])
    shown = _ABSOLUTE
    if metric == _TIME:
        ways = [_ABSOLUTE, _OF_FLOOR, _RELATIVE]
        shown = controls.select(st.container(), "show", "Show", ways, _ABSOLUTE, radio=True)
    release = None
    if shown == _RELATIVE:
        # A tag is part of the history of one repository only.
        project = min((series.project for series in chosen), default="")
        chosen = [series for series in chosen if series.project == project]
        release = _choose_release(controls, database, project)
        if release is None:
            return None
    if not chosen:
        st.info("No series passes all filters: remove one, or clear them all.")
        return None
    drawn = _one_of_each_kernel_first(chosen)[:_MAX_SERIES]
    branch = _choose_branch(controls, database, drawn)
    with database.session() as session:
        histories = {
            series: queries.series_history(session, series.id, branch=branch) for series in drawn
        }
        kernels = queries.kernel_names(session)
        breaks = [
            series_break.text
            for series_break in series_breaks(session, [series.id for series in drawn])
        ]
        by_question = paired_verdicts(
            session, [series.id for series in drawn if _is_external(series)]
        )
    if len(chosen) > _MAX_SERIES:
        st.info(
            f"{_MAX_SERIES} of {len(chosen)} series, one of each kernel first: narrow them by "
            "the filters.",
            icon=":material/filter_alt:",
        )
    frame = history_frame(
        histories,
        of_floor=shown == _OF_FLOOR,
        relative_to=None if release is None else release.topo_order,
    )
    if frame.empty:
        _show_nothing_drawn(shown, release)
        return None
    styles = kernel_styles(kernels, [(series.kernel, series.variant) for series in drawn])
    value, unit = _axis(drawn[0], shown, release)
    by_date = (
        controls.select(
            st.container(), "axis", "Over", [_BY_COMMIT, _BY_DATE], _BY_COMMIT, radio=True
        )
        == _BY_DATE
    )
    _draw(history_chart.history(frame, styles, value, unit, by_date=by_date))
    st.caption(
        "Bands and bars are 95 % intervals. A dashed line marks the start of an epoch: "
        "another environment, or an acknowledged change. Levels of different epochs are not "
        "comparable. Click a point for its raw samples."
    )
    if any(map(_is_external, drawn)):
        st.caption(
            "Series of the backend outside were measured by another tool: they are judged "
            f"{history_verdict.CAVEAT}."
        )
    for line in breaks:
        st.warning(as_text(line), icon=":material/swap_vert:")
    for paired in by_question:
        show = st.warning if paired.verdict == WORSE else st.info
        show(as_text(f"By question: {paired.text}"), icon=":material/quiz:")
    return _Drawn(frame, f"{value} ({unit})", histories)


def _is_external(series: SeriesName) -> bool:
    return series.backend == queries.EXTERNAL_BACKEND


def _one_of_each_kernel_first(chosen: Sequence[SeriesName]) -> list[SeriesName]:
    """Sort series so that as many kernels as possible are among the first, in their order."""
    seen: Counter[str] = Counter()
    turns: list[tuple[int, int, SeriesName]] = []
    for series in chosen:
        label = kernel_label(series.kernel, series.variant)
        turns.append((seen[label], len(turns), series))
        seen[label] += 1
    return [series for *_, series in sorted(turns, key=lambda turn: turn[:2])]


def _draw(figure: go.Figure) -> None:
    """Show the chart; a click on a point opens its measurement."""
    clicked = draw_chart(figure, "history-chart", on_select="rerun", selection_mode="points")
    for point in clicked["selection"]["points"]:
        uuid = point.get("customdata")
        if uuid is not None:
            st.switch_page(measurement.page.as_link(), query_params=measurement.link_of(str(uuid)))


def _choose_branch(
    controls: Controls, database: Database, drawn: Sequence[SeriesName]
) -> str | None:
    """Return the branch whose line is shown; None: the main branch, or series of several projects.

    Nothing can be chosen if no other branch has results.
    """
    projects = {series.project for series in drawn}
    if len(projects) > 1:
        return None
    with database.session() as session:
        names = queries.branch_names(session, *projects)
    if len(names) < 2:
        return None
    return controls.select(
        st.sidebar, "branch", "Branch", names, names[0], format_func=lambda name: name or "(main)"
    )


def _choose_release(controls: Controls, database: Database, project: str) -> ReleaseRow | None:
    with database.session() as session:
        stored = queries.releases(session, project=project)
    ordered = [row for row in stored if row.topo_order is not None]
    if not ordered:
        st.info(
            "No release is stored. Store the tags of the repository, in a clone of it: "
            f"{command_on(database, 'db', 'tags')}",
            icon=":material/sell:",
        )
        return None
    return controls.select(
        st.sidebar,
        "release",
        "Release",
        ordered,
        format_func=lambda row: f"{row.name} ({short_commit(row.sha, dirty=False)})",
        to_url=lambda row: row.name,
        always_in_url=True,
    )


def _axis(series: SeriesName, shown: str, release: ReleaseRow | None) -> tuple[str, str]:
    """Return the quantity of the values, and their unit."""
    if shown == _OF_FLOOR:
        return "floor / time", "%"
    if release is not None:
        return f"time / time at {html.escape(release.name)}", "%"
    if series.metric == _TIME:
        return "time", "µs"
    return html.escape(series.metric), html.escape(series.unit)


def _narrow(controls: Controls, series: Sequence[SeriesName]) -> list[SeriesName]:
    remaining = list(series)
    for field, label in _FILTERS.items():
        options = sorted({getattr(s, field) for s in series} - {None})
        selected = controls.multiselect(
            st.sidebar, field, label, options, format_func=lambda value: str(value) or "(none)"
        )
        if selected:
            remaining = [s for s in remaining if getattr(s, field) in selected]
    others = {s.parameters for s in remaining if s.operation != LINEAR and s.parameters}
    parameters = controls.multiselect(
        st.sidebar, "parameters", "Parameters", sorted(others, key=natural_order)
    )
    if parameters:
        remaining = [s for s in remaining if s.parameters in parameters]
    shapes = sorted({(s.n, s.k) for s in series if s.n is not None and s.k is not None})
    places = places_in_models(shapes)
    model = controls.multiselect(st.sidebar, "model", "Model", sorted({m for m, _ in places}))
    layer = controls.multiselect(st.sidebar, "layer", "Layer", sorted({name for _, name in places}))
    shape = controls.multiselect(
        st.sidebar,
        "shape",
        "N × K",
        shapes,
        format_func=lambda size: f"{size[0]} × {size[1]}",
        to_url=lambda size: f"{size[0]}x{size[1]}",
    )
    if model or layer:
        matching = {
            size
            for (its_model, its_layer), sizes in places.items()
            if (not model or its_model in model) and (not layer or its_layer in layer)
            for size in sizes
        }
        remaining = [s for s in remaining if (s.n, s.k) in matching]
    return [s for s in remaining if not shape or (s.n, s.k) in shape]


def _show_nothing_drawn(shown: str, release: ReleaseRow | None) -> None:
    if shown == _OF_FLOOR:
        st.info("No floor was measured with these results: choose absolute.")
        return
    if release is not None:
        st.info(
            f"None of these series was measured at {as_text(release.name)} or before it: choose "
            "another release, or absolute."
        )
        return
    st.info(
        "No accepted result of these series yet. A result is accepted if it is correct, was "
        "timed at a valid clock, and comes from a commit without local changes."
    )


def _show_patterns(drawn: _Drawn) -> None:
    """Show one row per series with the pattern of its newest epoch."""
    draw_table(pattern_frame(drawn.histories), key="patterns")
    st.caption(
        f"Pattern of the newest epoch of a series, over its newest {MAX_RESULTS} results, "
        "independent of the chart above. It is not an alert, which needs a confirmation."
    )


def _show_points(drawn: _Drawn, zone: tzinfo) -> None:
    """Show one row per point, with a link to all results of its run."""
    frame, value = drawn.frame, drawn.value
    places = frame["place"].unique()
    if len(places) > _MAX_COMMITS and not st.toggle(
        f"List all {len(frame):,} points", key="all-points"
    ):
        newest = sorted(places)[-_MAX_COMMITS]
        frame = frame[frame["place"] >= newest]
        st.caption(f"Listed are those of the newest {_MAX_COMMITS} commits.")
    table = pd.DataFrame(
        {
            "series": frame["name"],
            "commit": [short_commit(sha, dirty=False) for sha in frame["commit"]],
            value: frame["value"],
            "low": frame["low"],
            "high": frame["high"],
            "epoch": frame["epoch"],
            "run": [page_address("results", run=uuid[:8]) for uuid in frame["run"]],
            "samples": [
                page_address(measurement.URL, **measurement.link_of(uuid))
                for uuid in frame["measurement"]
            ],
            "measured": frame["created_at"].dt.tz_convert(zone),
        }
    )
    column = st.column_config
    draw_table(
        table,
        column_config={
            value: column.NumberColumn(format="%.4g"),
            "low": column.NumberColumn(format="%.4g", help="of the 95 % interval"),
            "high": column.NumberColumn(format="%.4g", help="of the 95 % interval"),
            "run": column.LinkColumn(display_text=r"run=(.*)$", help="all results of the run"),
            "samples": column.LinkColumn(
                display_text=r"uuid=(.{8})", help="the raw samples of this result"
            ),
            "measured": column.DatetimeColumn(format="YYYY-MM-DD HH:mm"),
        },
        key="points",
    )
