"""Chart of published and measured ratios."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import (
    GREY,
    LEGEND_ABOVE,
    error_bars,
    log_axis,
    set_size,
    wrap_text,
)

_MEASURED_COLOR = "#0072B2"
_ROW_PX = 36  # two lines of a name
_AROUND_PX = 150


def ratio_chart(frame: pd.DataFrame) -> go.Figure:
    """Plot ratios on a log axis: published as open diamonds, measured as points with intervals.

    frame: see dashboard.views.paper.frame.COLUMNS; rows that are not ratios are left out.
    """
    shown = frame[frame["unit"] == "×"]
    names = [wrap_text(html.escape(_name(row))) for row in shown.to_dict("records")]
    figure = go.Figure()
    figure.add_scatter(
        name="published",
        x=shown["published"].tolist(),
        y=names,
        mode="markers",
        marker={"color": GREY, "symbol": "diamond-open", "size": 11, "line": {"width": 2}},
        text=[_published(row) for row in shown.to_dict("records")],
        hovertemplate="%{text}<extra>published</extra>",
    )
    is_ours = shown["ours"].notna().tolist()
    ours = shown[is_ours]
    figure.add_scatter(
        name="ours",
        x=ours["ours"].tolist(),
        y=[name for name, here in zip(names, is_ours, strict=True) if here],
        error_x=error_bars(ours["ours"], ours["ours_low"], ours["ours_high"], width=4),
        mode="markers",
        marker={"color": _MEASURED_COLOR, "symbol": "circle", "size": 9},
        text=[_measured(row) for row in ours.to_dict("records")],
        hovertemplate="%{text}<extra>measured here</extra>",
    )
    figure.add_vline(1, line={"color": GREY, "width": 1})
    figure.update_xaxes(
        title="ratio (×, log scale)", **log_axis([*shown["published"], *ours["ours"]])
    )
    order = list(dict.fromkeys(names))[::-1]
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=order)
    height = _AROUND_PX + _ROW_PX * len(order)
    return set_size(figure, height, top=60, legend=LEGEND_ABOVE, hoverlabel={"align": "left"})


def _name(row: Mapping[Any, Any]) -> str:
    paper = str(row["source"]).partition(",")[0]
    over = f"{row['our_kernel'] or row['kernel']} over {row['baseline']}"
    tokens = f"M = {row['m']}" if row["m"] else ""
    parts = (f"{paper}:", row["metric"], over, row["model"], tokens)
    return " ".join(str(part) for part in parts if part)


def _published(row: Mapping[Any, Any]) -> str:
    bound = f"{row['bound']} " if row["bound"] else ""
    return html.escape(f"{bound}{row['published']:g} × on {row['hardware']}: {row['table']}")


def _measured(row: Mapping[Any, Any]) -> str:
    return html.escape(
        f"{row['ours']:.4g} × ({row['ours_low']:.4g} to {row['ours_high']:.4g}) on {row['gpu']}, "
        f"{row['our_kernel']}, {row['cases']} cases"
        + (f": {row['caveats']}" if row["caveats"] else "")
    )
