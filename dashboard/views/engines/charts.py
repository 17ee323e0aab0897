"""Chart of engines: the change of accuracy over the change of speed."""

from __future__ import annotations

import html
from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import GREY, error_bars, set_layout
from flexq_bench.dashboard.shared.colors import Style

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
    for row in frame.dropna(subset=["accuracy change", "speed change"]).to_dict("records"):
        point = pd.DataFrame([row])
        bars = {
            axis: error_bars(point[f"{name} change"], point[f"{name} low"], point[f"{name} high"])
            for axis, name in (("error_x", "speed"), ("error_y", "accuracy"))
        }
        figure.add_scatter(
            name=html.escape(f"{row['engine']} · {row['model']} · {row['verdict']}"),
            x=point["speed change"],
            y=point["accuracy change"],
            mode="markers",
            marker={
                "color": styles[str(row["engine"])].color,
                "symbol": _SYMBOLS.get(str(row["outcome"]), _UNDECIDED),
                "size": 12,
            },
            hovertemplate="%{x:+.3g} %, %{y:+.3g} points<extra>%{fullData.name}</extra>",
            **bars,
        )
    figure.update_xaxes(title=f"change of {html.escape(speed)} (%)")
    figure.update_yaxes(title=f"change of accuracy against {html.escape(base)} (points)")
    return set_layout(figure, _HEIGHT_PX)
