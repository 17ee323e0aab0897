"""Curves of a sweep over M, N or K."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import error_bars, log_axis, set_layout
from flexq_bench.dashboard.shared.colors import Style

AXES = {"m": "M (tokens)", "n": "N (output features)", "k": "K (input features)"}
VALUES = {
    "median_us": ("time", "µs"),
    "tops": ("rate", "TOPS"),
    "pct_of_floor": ("floor / time", "%"),
}
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_HEIGHT_PX = 480
_LEGEND_PX = 22


def with_ends(frame: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return the timed rows with `low` and `high` of the value's 95 % interval.

    frame: see results_frame.COLUMNS. value: one of VALUES.
    """
    shown = frame[frame["is_timed"] & frame[value].notna()].copy()
    if value == "median_us":
        ends = shown["ci_low_us"], shown["ci_high_us"]
    elif value == "tops":  # reciprocal of the time's interval
        rate = shown["tops"] * shown["median_us"]
        ends = rate / shown["ci_high_us"], rate / shown["ci_low_us"]
    else:
        ends = shown["pct_of_floor_low"], shown["pct_of_floor_high"]
    shown["low"], shown["high"] = (end.fillna(shown[value]) for end in ends)
    return shown


def curves(points: pd.DataFrame, styles: Mapping[str, Style], axis: str, value: str) -> go.Figure:
    """Plot a line with error bars per kernel and the other two sizes; log axes except for %.

    points: of `with_ends` for this value. axis: one of AXES.
    """
    other_axes = [name for name in (*AXES, "stage", "cache") if name != axis]
    varying = [name for name in other_axes if points[name].nunique() > 1]
    figure = go.Figure()
    drawn: dict[str, int] = {}
    for key, rows in points.sort_values(["label", *other_axes, axis]).groupby(
        ["label", *other_axes], sort=False
    ):
        label = str(key[0])
        setting = dict(zip(other_axes, key[1:], strict=True))
        values = (f"{n.upper()}={setting[n]}" if n in AXES else str(setting[n]) for n in varying)
        name = " ".join([label, *values])
        dash = _DASHES[drawn.get(label, 0) % len(_DASHES)]
        drawn[label] = drawn.get(label, 0) + 1
        style = styles[label]
        figure.add_scatter(
            name=html.escape(name),
            x=rows[axis].tolist(),
            y=rows[value].tolist(),
            error_y=error_bars(rows[value], rows["low"], rows["high"], width=3),
            mode="lines+markers",
            line={"color": style.color, "width": 2, "dash": dash},
            marker={"color": style.color, "symbol": style.symbol, "size": 8},
            text=[_hover(row, value) for row in rows.to_dict("records")],
            hovertemplate=f"<b>{html.escape(label)}</b><br>%{{text}}<extra></extra>",
        )
    what, unit = VALUES[value]
    is_share = value == "pct_of_floor"
    figure.update_xaxes(title=f"{AXES[axis]}, log scale", **log_axis(points[axis]))
    figure.update_yaxes(
        title=f"{what} ({unit}{'' if is_share else ', log scale'})",
        **({"rangemode": "tozero"} if is_share else log_axis(points[value])),
    )
    return set_layout(figure, _HEIGHT_PX + _LEGEND_PX * len(figure.data) // 3)


def _hover(row: Mapping[Any, Any], value: str) -> str:
    noisy = "<br>noisy: its interval did not converge" if row["status"] == "noisy" else ""
    return (
        f"M={row['m']} N={row['n']} K={row['k']} {row['stage']} {row['cache']}<br>"
        f"{row[value]:.5g} {VALUES[value][1]} ({row['low']:.5g} to {row['high']:.5g}){noisy}"
    )
