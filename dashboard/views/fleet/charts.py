"""Chart of times of single GPUs relative to the mean of their SKU."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import GREY, error_bars, set_size
from flexq_bench.db.queries import OffsetRow

_ROW_PX = 34
_AROUND_PX = 120
_COLOR = "#0072B2"


def device_offsets(offsets: Sequence[OffsetRow]) -> go.Figure:
    """Plot each GPU's time relative to the mean of its SKU (%), with its 95 % interval."""
    logs = np.array([(row.low, row.log_offset, row.high) for row in offsets]).reshape(-1, 3)
    low, estimates, high = 100 * np.expm1(logs).T
    figure = go.Figure(
        go.Scatter(
            x=estimates.tolist(),
            y=[html.escape(f"{row.device} · {row.gpu}") for row in offsets],
            error_x=error_bars(estimates, low, high),
            mode="markers",
            marker={"color": _COLOR, "size": 9},
            text=[f"{row.cases} cases, run {html.escape(row.run[:8])}" for row in offsets],
            hovertemplate="%{x:+.2f} %<br>%{text}<extra></extra>",
        )
    )
    figure.add_vline(0, line={"color": GREY, "width": 1.5, "dash": "dash"})
    figure.update_xaxes(title="time against the mean of its kind (%)", ticksuffix=" %")
    figure.update_yaxes(title="GPU", type="category", autorange="reversed")
    return set_size(figure, _AROUND_PX + _ROW_PX * len(offsets))
