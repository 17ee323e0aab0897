"""History: how series went from commit to commit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import tzinfo

import pandas as pd
import streamlit as st

from dashboard import history_chart
from dashboard.colors import kernel_styles
from dashboard.database import current_database, errors_shown
from dashboard.empty import say_that_it_is_empty
from dashboard.history_frame import history_frame
from dashboard.links import Link
from dashboard.words import as_text, short_commit, zone_named
from db import queries
from db.engine import Database
from db.queries import SeriesName
from flexq_bench.probes import is_probe
from workloads.models import load_catalog

_FILTERS = {  # field: what people call it; the field's name is its name in the URL
    "kernel": "Kernel",
    "variant": "Variant",
    "m": "M (tokens)",
    "gpu": "GPU",
    "stage": "Stage",
    "cache": "Cache",
}
_DRAWN = 12  # series in one chart: more can't be told apart
_TIME = "time"
_ABSOLUTE, _OF_FLOOR = "absolute", "% of floor"


def as_page() -> st.Page:
    """Where the page is in the app."""
    return st.Page(page, title="History", icon=":material/show_chart:", url_path="history")


def page() -> None:
    """Choose series, look at how they went."""
    st.header("History")
    with errors_shown():
        database = current_database()
        with database.session() as session:
            known = [s for s in queries.series_names(session) if not is_probe(s.kernel)]
        if not known:
            say_that_it_is_empty(database)
            return
        link = Link("history")
        on_top = st.empty()
        _show(link, database, known)
        if link.ignored:
            missing = ", ".join(as_text(name) for name in link.ignored)
            on_top.warning(f"Not among the stored series, so not asked for: {missing}.")
        if link.is_narrowed:
            st.sidebar.button("Clear all", on_click=link.clear, icon=":material/filter_alt_off:")


def _show(link: Link, database: Database, known: Sequence[SeriesName]) -> None:
    metrics = sorted({series.metric for series in known})
    default = _TIME if _TIME in metrics else metrics[0]
    metric = link.one(st.sidebar, "metric", "Metric", metrics, default)
    chosen = _narrow(link, [series for series in known if series.metric == metric])
    of_floor = metric == _TIME and (
        link.one(st.container(), "show", "Show", [_ABSOLUTE, _OF_FLOOR], _ABSOLUTE, in_a_row=True)
        == _OF_FLOOR
    )
    if not chosen:
        st.info("No series passes all filters: take one away, or clear them all.")
        return
    drawn = chosen[:_DRAWN]
    with database.session() as session:
        histories = {one: queries.series_history(session, one.id) for one in drawn}
        kernels = queries.kernel_names(session)
    if len(chosen) > _DRAWN:
        st.info(
            f"These are the first {_DRAWN} of {len(chosen)} series: narrow them by the filters.",
            icon=":material/filter_alt:",
        )
    frame = history_frame(histories, of_floor=of_floor)
    if frame.empty:
        _say_that_nothing_is_accepted(of_floor)
        return
    styles = kernel_styles(kernels, [(one.kernel, one.variant) for one in drawn])
    value, unit = _axis(drawn[0], of_floor)
    st.plotly_chart(history_chart.history(frame, styles, value, unit), key="history")
    st.caption(
        "Bands and bars are 95 % intervals. A dashed rule: a series starts a new epoch there, with "
        "another environment or after a change that was explained; levels of two epochs don't "
        "compare."
    )
    _show_points(frame, f"{value} ({unit})", zone_named(st.context.timezone))


def _axis(series: SeriesName, of_floor: bool) -> tuple[str, str]:
    """What the values are, and their unit."""
    if of_floor:
        return "floor / median", "%"
    if series.metric == _TIME:
        return "median time", "µs"
    return series.metric, series.unit


def _narrow(link: Link, series: Sequence[SeriesName]) -> list[SeriesName]:
    found = list(series)
    for field, label in _FILTERS.items():
        options = sorted({getattr(one, field) for one in series})
        wanted = link.many(
            st.sidebar, field, label, options, shown=lambda value: str(value) or "(none)"
        )
        if wanted:
            found = [one for one in found if getattr(one, field) in wanted]
    shapes = sorted({(one.n, one.k) for one in series})
    places = _places_in_models(shapes)
    model = link.many(st.sidebar, "model", "Model", sorted({m for m, _ in places}))
    layer = link.many(st.sidebar, "layer", "Layer", sorted({name for _, name in places}))
    shape = link.many(
        st.sidebar,
        "shape",
        "N × K",
        shapes,
        shown=lambda one: f"{one[0]} × {one[1]}",
        written=lambda one: f"{one[0]}x{one[1]}",
    )
    if model or layer:
        fitting = {
            one
            for (its_model, its_layer), shapes_there in places.items()
            if (not model or its_model in model) and (not layer or its_layer in layer)
            for one in shapes_there
        }
        found = [one for one in found if (one.n, one.k) in fitting]
    return [one for one in found if not shape or (one.n, one.k) in shape]


def _places_in_models(
    shapes: Sequence[tuple[int, int]],
) -> dict[tuple[str, str], set[tuple[int, int]]]:
    """Shapes by model and layer: a series belongs to every model that has its shape."""
    known = set(shapes)
    places = defaultdict(set)
    for model in load_catalog().values():
        for layer in model.all_layers():
            if (layer.n, layer.k) in known:
                places[model.name, layer.name].add((layer.n, layer.k))
    return dict(places)


def _say_that_nothing_is_accepted(of_floor: bool) -> None:
    if of_floor:
        st.info("No floor was measured beside these results: choose absolute.")
        return
    st.info(
        "No accepted result of these series yet. A result is accepted if it is right, was timed at "
        "a sound clock, and comes from a commit without local changes."
    )


def _show_points(frame: pd.DataFrame, value: str, zone: tzinfo) -> None:
    """One row a point; its run leads to all results of that run."""
    table = pd.DataFrame(
        {
            "series": frame["name"],
            "commit": [short_commit(sha, dirty=False) for sha in frame["commit"]],
            value: frame["value"],
            "low": frame["low"],
            "high": frame["high"],
            "epoch": frame["epoch"],
            "run": [f"results?run={uuid[:8]}" for uuid in frame["run"]],
            "measured": frame["created_at"].dt.tz_convert(zone),
        }
    )
    column = st.column_config
    st.dataframe(
        table,
        hide_index=True,
        column_config={
            value: column.NumberColumn(format="%.4g"),
            "low": column.NumberColumn(format="%.4g", help="of the 95 % interval"),
            "high": column.NumberColumn(format="%.4g", help="of the 95 % interval"),
            "run": column.LinkColumn(display_text=r"run=(.*)$", help="all results of the run"),
            "measured": column.DatetimeColumn(format="YYYY-MM-DD HH:mm"),
        },
        key="points",
    )
