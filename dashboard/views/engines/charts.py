"""Charts of engines: accuracy over speed, as changes and as values."""

from __future__ import annotations

import html
from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import GREY, error_bars, set_layout
from flexq_bench.dashboard.shared.colors import Style
from flexq_bench.dashboard.views.engines.frame import with_intervals_of_values

_HEIGHT_PX = 440
_SYMBOLS = {"pass": "circle", "ambiguous": "diamond-open"}
_SYMBOLS |= dict.fromkeys(("fail", "regression"), "x")
_UNDECIDED = "circle-open"


def accuracy_over_speed(
    frame: pd.DataFrame, styles: Mapping[str, Style], speed: str, base: str
) -> go.Figure:
    """Plot a point per engine with both intervals. frame: see frame.engines_frame.

    speed: the metric. The lines cross at the base. A symbol stands for the gate's verdict.
    """
    figure = go.Figure()
    line = {"color": GREY, "width": 1, "dash": "dash"}
    figure.add_hline(y=0, line=line)
    figure.add_vline(x=0, line=line)
    _add_engines(figure, frame, styles, " change", "%{x:+.3g} %, %{y:+.3g} points")
    figure.update_xaxes(title=f"change of {html.escape(speed)} (%)")
    figure.update_yaxes(title=f"change of accuracy against {html.escape(base)} (points)")
    return set_layout(figure, _HEIGHT_PX)


def accuracy_and_speed(
    frame: pd.DataFrame, styles: Mapping[str, Style], speed: str, base: str
) -> go.Figure:
    """Plot the values themselves, and grey ones of the base in each gate. As accuracy_over_speed.

    Intervals are those of the changes, around the base that each engine was measured with.
    """
    figure = go.Figure()
    values = with_intervals_of_values(frame)
    figure.add_scatter(
        name=html.escape(base),
        x=values["speed of base"],
        y=values["accuracy of base"],
        mode="markers",
        marker={"color": GREY, "symbol": "star", "size": 12},
        hovertemplate="%{x:.4g}, %{y:.3g} %<extra>%{fullData.name}</extra>",
    )
    _add_engines(figure, values, styles, "", "%{x:.4g}, %{y:.3g} %")
    figure.update_xaxes(title=html.escape(speed))
    figure.update_yaxes(title="accuracy (%)")
    return set_layout(figure, _HEIGHT_PX)


def _add_engines(
    figure: go.Figure, frame: pd.DataFrame, styles: Mapping[str, Style], suffix: str, hover: str
) -> None:
    """Add a point per engine. suffix: of the columns of both coordinates."""
    columns = {axis: f"{axis}{suffix}" for axis in ("speed", "accuracy")}
    for row in frame.dropna(subset=list(columns.values())).to_dict("records"):
        point = pd.DataFrame([row])
        bars = {
            axis: error_bars(point[columns[name]], point[f"{name} low"], point[f"{name} high"])
            for axis, name in (("error_x", "speed"), ("error_y", "accuracy"))
        }
        figure.add_scatter(
            name=html.escape(f"{row['engine']} · {row['model']} · {row['verdict']}"),
            x=point[columns["speed"]],
            y=point[columns["accuracy"]],
            mode="markers",
            marker={
                "color": styles[str(row["engine"])].color,
                "symbol": _SYMBOLS.get(str(row["outcome"]), _UNDECIDED),
                "size": 12,
            },
            hovertemplate=f"{hover}<extra>%{{fullData.name}}</extra>",
            **bars,
        )
