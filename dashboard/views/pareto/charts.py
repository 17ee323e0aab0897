"""Charts of accuracy loss over time or memory of checkpoints; the lower left is better."""

from __future__ import annotations

import html
from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import error_bars, set_layout
from flexq_bench.dashboard.shared.colors import Style
from flexq_bench.dashboard.views.pareto.frame import RANDOM_WEIGHTS, front

_HEIGHT_PX = 420


def against(frame: pd.DataFrame, styles: Mapping[str, Style], across: str, title: str) -> go.Figure:
    """Plot the perplexity increase with its interval over a column, a point per checkpoint.

    frame: see frame.pareto_frame. across: token_ms, which has an interval, or memory_gib. A line
    connects the Pareto front.
    """
    figure = go.Figure()
    drawn = frame.dropna(subset=[across, "increase"])
    best = front(drawn, across)
    figure.add_scatter(
        name="Pareto front",
        x=best[across],
        y=best["increase"],
        mode="lines",
        line={"width": 1, "dash": "dot", "color": "gray", "shape": "hv"},
        hoverinfo="skip",
    )
    for row in drawn.to_dict("records"):
        point = pd.DataFrame([row])
        style = styles[str(row["scheme"])]
        times = None
        if across == "token_ms":
            times = error_bars(point["token_ms"], point["token_low"], point["token_high"])
        is_random = row["speed_of"] == RANDOM_WEIGHTS
        figure.add_scatter(
            name=html.escape(f"{row['scheme']} {row['checkpoint']}"),
            x=point[across],
            y=point["increase"],
            error_x=times,
            error_y=error_bars(point["increase"], point["low"], point["high"]),
            mode="markers",
            marker={
                "color": style.color,
                "symbol": f"{style.symbol}-open" if is_random else style.symbol,
                "size": 11,
            },
            hovertemplate="%{x:.4g}, %{y:+.3g} %"
            + (f"<br>speed of {RANDOM_WEIGHTS}" if is_random else "")
            + "<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title=title, rangemode="tozero")
    figure.update_yaxes(title="perplexity increase over fp16 (%)")
    return set_layout(figure, _HEIGHT_PX)
