"""History of a verdict's series around the alert's commits, and on other GPU models."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from flexq_bench.dashboard.shared import history_chart
from flexq_bench.dashboard.shared.charts import GREY, draw_chart
from flexq_bench.dashboard.shared.colors import Style, kernel_styles
from flexq_bench.dashboard.shared.formatting import as_code, as_text, short_commit
from flexq_bench.dashboard.shared.history_frame import history_frame
from flexq_bench.db import queries
from flexq_bench.db.engine import Session
from flexq_bench.db.queries import AlertRow, DecisionRow, HistoryPoint, SeriesName
from flexq_bench.results.series_breaks import series_breaks
from flexq_bench.stats.newest_step import FEWEST_POINTS
from flexq_bench.verdicts.change_points import Point, Scale, find_change_points
from flexq_bench.verdicts.commit_points import one_per_commit
from flexq_bench.verdicts.history_verdict import Metric, change_text

_SAME_CASE = (
    *("kernel", "kernel_version", "variant", "backend", "stage", "cache", "metric", "unit"),
    *("operation", "parameters", "protocol_version", "project"),
)
_INTERVALS = "Bands and bars are 95 % intervals; a dashed rule starts an epoch."


@dataclass(frozen=True, slots=True)
class _Step:
    """A change point at this place of the frame. sha: first commit on the new level."""

    place: int
    sha: str
    change: str  # in words
    p_value: float


def show_series(
    session: Session, alert: AlertRow, member: DecisionRow, kernels: Sequence[str]
) -> None:
    """Show the verdict's series with its change points, then the same case on all GPU models.

    kernels: all kernels of the database, for the colours.
    """
    on_all_gpus = _series_on_all_gpus(session, member.series_id)
    histories = {series: queries.series_history(session, series.id) for series in on_all_gpus}
    own = {series: points for series, points in histories.items() if series.id == member.series_id}
    styles = kernel_styles(kernels, [(member.kernel, member.variant)])
    st.header("History", anchor=False)
    frame = history_frame(own)
    if frame.empty:
        st.info(
            "No accepted result of this series is stored: its verdict comes from the interleaved "
            "A/B measurement alone. The nightly run adds to it."
        )
    else:
        metric = Metric(member.metric, member.unit, member.direction)
        unit = "µs" if member.unit == "us" else html.escape(member.unit)
        figure = history_chart.history(frame, styles, html.escape(member.metric), unit)
        combined = {series: one_per_commit(points) for series, points in own.items()}
        levels = history_frame(combined)
        points = next(iter(combined.values()), [])
        steps = _change_points(levels, metric, {one.commit: one.reruns for one in points})
        _mark(figure, frame, alert, steps)
        draw_chart(figure, key="member-history")
        st.caption(f"{_INTERVALS} Grey: from the last good commit to the first bad one.")
        st.markdown(_in_words(levels, steps))
    for one in series_breaks(session, [member.series_id]):
        st.warning(as_text(one.text), icon=":material/swap_vert:")
    _show_by_gpu(alert, histories, styles)


def _series_on_all_gpus(session: Session, series_id: int) -> list[SeriesName]:
    """Return the series itself and those that differ from it only in their GPU."""
    known = queries.series_names(session)
    own = next(series for series in known if series.id == series_id)
    return [s for s in known if all(getattr(s, f) == getattr(own, f) for f in _SAME_CASE)]


def _change_points(
    frame: pd.DataFrame, metric: Metric, reruns: Mapping[str, Sequence[float]]
) -> list[_Step]:
    """Return the changes of level within each epoch; `frame`: of one series. reruns: by commit."""
    steps = []
    for _, part in frame.groupby("epoch", sort=False):
        rows = part.reset_index(drop=True)
        columns = (rows["value"], rows["device"], rows["commit"])
        points = [
            Point(value, device, reruns=reruns.get(commit, ()))
            for value, device, commit in zip(*columns, strict=True)
        ]
        found = find_change_points(points, metric.scale)
        for change in found.with_waiting:
            row = rows.iloc[change.index]
            text = change_text(change, metric)
            text = text if metric.scale is Scale.RATIO else as_text(text)
            text += "" if change in found.steps else ", not decided yet"
            steps.append(_Step(int(row["place"]), str(row["commit"]), text, change.p_value))
    return steps


def _mark(figure: go.Figure, frame: pd.DataFrame, alert: AlertRow, steps: Sequence[_Step]) -> None:
    places = dict(zip(frame["commit"], frame["place"], strict=True))
    bad = places.get(alert.bad.sha)
    good = None if alert.good is None else places.get(alert.good.sha)
    if bad is not None:
        start = bad - 0.5 if good is None else good
        figure.add_vrect(
            start, bad, fillcolor=GREY, opacity=0.25, line_width=0,
            name="range of the alert", showlegend=True,
        )  # fmt: skip
    for i, step in enumerate(steps):
        figure.add_vline(
            step.place - 0.5, line={"color": GREY, "width": 2, "dash": "dot"},
            name="change point", showlegend=i == 0,
        )  # fmt: skip


def _in_words(frame: pd.DataFrame, steps: Sequence[_Step]) -> str:
    if steps:
        return "  \n".join(
            f"The level changed at {as_code(short_commit(step.sha, dirty=False))}: "
            f"**{step.change}** (p = {step.p_value:.3f})"
            for step in steps
        )
    longest = int(frame["epoch"].value_counts().max())
    if longest < FEWEST_POINTS:
        return (
            f"Too few results to detect change points: {FEWEST_POINTS} of one epoch are needed, "
            f"there are {longest}."
        )
    return "The history by itself shows no change point of 1 % or more."


def _show_by_gpu(
    alert: AlertRow,
    histories: Mapping[SeriesName, Sequence[HistoryPoint]],
    styles: Mapping[str, Style],
) -> None:
    """Show the same case on all GPUs, relative to its time at the last good commit."""
    st.header("On each kind of GPU", anchor=False)
    good = None if alert.good is None else alert.good.topo_order
    if good is None or alert.good is None:
        st.info("Times can't be relative: there is no last good commit in the ancestry.")
        return
    frame = history_frame(histories, relative_to=good)
    if frame.empty:
        st.info("This case was not measured on any GPU at the last good commit or before it.")
        return
    frame["name"] = frame["series"].map({series.id: series.gpu for series in histories})
    value = f"time / time at {html.escape(short_commit(alert.good.sha, dirty=False))}"
    figure = history_chart.history(frame, styles, value, "%")
    figure.add_hline(100, line={"color": GREY, "width": 1.5})
    draw_chart(figure, key="by-gpu")
    missing = sorted({series.gpu for series in histories} - set(frame["name"]))
    st.caption(
        _INTERVALS
        + (f" Not measured at the last good commit: {as_text(', '.join(missing))}." if missing
           else "")
    )  # fmt: skip
