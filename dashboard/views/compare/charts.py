"""Charts of two compared sides: times, and changes."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import GREY, LEGEND_ABOVE, error_bars, log_axis, set_size
from flexq_bench.dashboard.shared.colors import Style
from flexq_bench.stats.log_series import SMALLEST_LOG_RATIO
from flexq_bench.workloads.operation import describe

_HEIGHT_PX = 480
_ROW_PX = 24
_AROUND_PX = 150


def times(frame: pd.DataFrame, styles: Mapping[str, Style], base: str, head: str) -> go.Figure:
    """Scatter plot of head's against base's times with intervals, log axes and the diagonal.

    frame: see dashboard.views.compare.frame.COLUMNS; rows without both times are left out.
    """
    shown = frame[frame["base_us"].notna() & frame["head_us"].notna()]
    figure = go.Figure()
    both = [*shown["base_us"], *shown["head_us"]]
    ends = [min(both) / 1.2, max(both) * 1.2]
    figure.add_scatter(
        x=ends, y=ends, mode="lines", name="equal", hoverinfo="skip",
        line={"color": GREY, "width": 1.5, "dash": "dash"},
    )  # fmt: skip
    for label in sorted(shown["label"].unique()):
        rows = shown[shown["label"] == label]
        style = styles[label]
        figure.add_scatter(
            name=html.escape(label),
            x=rows["base_us"].tolist(),
            y=rows["head_us"].tolist(),
            error_x=_bars(rows, "base_us"),
            error_y=_bars(rows, "head_us"),
            mode="markers",
            marker={"color": style.color, "symbol": style.symbol, "size": 8},
            text=[_hover(row) for row in rows.to_dict("records")],
            hovertemplate=f"<b>{html.escape(label)}</b><br>%{{text}}<extra></extra>",
        )
    figure.update_xaxes(title=f"{html.escape(base)}: time (µs, log scale)", **log_axis(both))
    figure.update_yaxes(title=f"{html.escape(head)}: time (µs, log scale)", **log_axis(both))
    return _set_layout(figure, _HEIGHT_PX)


def changes(frame: pd.DataFrame, styles: Mapping[str, Style]) -> go.Figure:
    """Plot head's change of time (%) with its interval, a line per case in the frame's order."""
    shown = frame[frame["ratio"].notna()]
    figure = go.Figure()
    names = [_case(row) for row in shown.to_dict("records")]
    for label in sorted(shown["label"].unique()):
        at = (shown["label"] == label).tolist()
        rows = shown[at]
        style = styles[label]
        percent = 100 * (rows[["ratio", "ratio_low", "ratio_high"]] - 1)
        figure.add_scatter(
            name=html.escape(label),
            x=percent["ratio"].tolist(),
            y=[name for name, here in zip(names, at, strict=True) if here],
            error_x=_bars(percent, "ratio"),
            mode="markers",
            marker={"color": style.color, "symbol": style.symbol, "size": 8},
            text=[_hover(row) for row in rows.to_dict("records")],
            hovertemplate=f"<b>{html.escape(label)}</b><br>%{{text}}<extra></extra>",
        )
    figure.add_vline(0, line={"color": GREY, "width": 1.5})
    for sign in (1, -1):
        figure.add_vline(
            100 * math.expm1(sign * SMALLEST_LOG_RATIO),
            line={"color": GREY, "width": 1.5, "dash": "dash"},
            name="smallest relevant change",
            showlegend=sign > 0,
        )
    figure.update_xaxes(title="change of the time, head against base (%)", ticksuffix=" %")
    figure.update_yaxes(
        title="case", type="category", categoryorder="array", categoryarray=names[::-1]
    )
    return _set_layout(figure, _AROUND_PX + _ROW_PX * len(names))


def _bars(rows: pd.DataFrame, value: str) -> dict[str, Any]:
    middle = rows[value]
    low, high = (rows[f"{value}_{end}"].fillna(middle) for end in ("low", "high"))
    return error_bars(middle, low, high, width=3)


def _case(row: Mapping[Any, Any]) -> str:
    place = row["layer"] if row["model"] else ""  # shapes without a model are named by their size
    parts = (row["label"], row["model"], place, _shape(row))
    path = (
        "" if (row["stage"], row["cache"]) == ("gemm", "cold") else f"{row['stage']} {row['cache']}"
    )
    return html.escape(" ".join(part for part in (*parts, path, row["gpu"]) if part))


def _shape(row: Mapping[Any, Any]) -> str:
    if row["operation"] == "linear":
        return f"M={row['m']} {row['n']}×{row['k']}"
    return describe(row["operation"], row["parameters"])


def _hover(row: Mapping[Any, Any]) -> str:
    change = ""
    if not pd.isna(row["ratio"]):
        low, estimate, high = (
            f"{100 * (row[name] - 1):+.2f}" for name in ("ratio_low", "ratio", "ratio_high")
        )
        change = f"{estimate} % ({low} to {high})<br>"
    return f"{_case(row)}<br>{change}{row['verdict']}: {row['evidence']}"


def _set_layout(figure: go.Figure, height: int) -> go.Figure:
    return set_size(
        figure,
        height,
        top=60,
        legend=LEGEND_ABOVE,
        showlegend=True,
        hoverlabel={"align": "left"},
    )
