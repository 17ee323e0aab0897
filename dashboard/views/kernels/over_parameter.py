"""Time of kernels of one operation over one of its parameters."""

from __future__ import annotations

import html
from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import GREY, error_bars, log_axis, set_layout
from flexq_bench.dashboard.shared.colors import Style
from flexq_bench.workloads.operation import parse_values

_HEIGHT_PX = 480


def over_parameter(frame: pd.DataFrame, axis: str, styles: Mapping[str, Style]) -> go.Figure:
    """Plot the time of each kernel over a parameter, both axes logarithmic, with the floor.

    frame: results_frame.COLUMNS, timed rows that differ in the kernel and this parameter only.
    """
    at = [dict(parse_values(text))[axis] for text in frame["parameters"]]
    rows = frame.assign(at=at).sort_values("at")
    figure = go.Figure()
    for label, part in rows.groupby("label"):
        name, style = str(label), styles[str(label)]
        figure.add_scatter(
            name=html.escape(name),
            x=part["at"].tolist(),
            y=part["median_us"].tolist(),
            error_y=error_bars(
                part["median_us"],
                part["ci_low_us"].fillna(part["median_us"]),
                part["ci_high_us"].fillna(part["median_us"]),
                width=3,
            ),
            mode="lines+markers",
            line={"color": style.color},
            marker={"color": style.color, "symbol": style.symbol, "size": 9},
            hovertemplate=f"<b>{html.escape(name)}</b><br>{axis}=%{{x}}<br>%{{y:.4g}} µs"
            "<extra></extra>",
        )
    floors = rows[rows["floor_us"].notna()].groupby("at")["floor_us"].min()
    if len(floors):
        figure.add_scatter(
            name="floor: reading what must be read",
            x=floors.index.tolist(),
            y=floors.tolist(),
            mode="lines",
            line={"color": GREY, "dash": "dash"},
        )
    figure.update_xaxes(title=axis.replace("_", " "), **log_axis(map(float, rows["at"])))
    figure.update_yaxes(title="time (µs)", **log_axis(rows["median_us"].tolist()))
    return set_layout(figure, _HEIGHT_PX)
