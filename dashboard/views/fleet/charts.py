"""Chart of times of single GPUs relative to the mean of their SKU."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import GREY
from flexq_bench.db.queries import OffsetRow

_ROW_PX = 34
_AROUND_PX = 120
_COLOR = "#0072B2"


def device_offsets(offsets: Sequence[OffsetRow]) -> go.Figure:
    """Plot each GPU's time relative to the mean of its SKU (%), with its 95 % interval."""
    percents = [[_percent(v) for v in (row.low, row.log_offset, row.high)] for row in offsets]
    figure = go.Figure(
        go.Scatter(
            x=[estimate for _, estimate, _ in percents],
            y=[html.escape(f"{row.device} · {row.gpu}") for row in offsets],
            error_x={
                "type": "data",
                "array": [high - estimate for _, estimate, high in percents],
                "arrayminus": [estimate - low for low, estimate, _ in percents],
                "thickness": 1.5,
            },
            mode="markers",
            marker={"color": _COLOR, "size": 9},
            text=[f"{row.cases} cases, run {html.escape(row.run[:8])}" for row in offsets],
            hovertemplate="%{x:+.2f} %<br>%{text}<extra></extra>",
        )
    )
    figure.add_vline(0, line={"color": GREY, "width": 1.5, "dash": "dash"})
    figure.update_xaxes(title="time against the mean of its kind (%)", ticksuffix=" %")
    figure.update_yaxes(title="GPU", type="category", autorange="reversed")
    return figure.update_layout(
        height=_AROUND_PX + _ROW_PX * len(offsets),
        margin={"l": 10, "r": 40, "t": 20, "b": 10},
        modebar={"orientation": "v"},
    )


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)
