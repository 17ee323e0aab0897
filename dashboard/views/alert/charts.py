"""Chart of a verdict's evidence: all A/B blocks by placement, with the bounds."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import GREY, LEGEND_ABOVE, set_size
from flexq_bench.dashboard.shared.colors import Style
from flexq_bench.verdicts import Comparison, Confirmation
from flexq_bench.verdicts.evidence_plot import placements_of

_ROW_PX = 34
_AROUND_PX = 190


def block_changes(comparison: Comparison, confirmation: Confirmation, style: Style) -> go.Figure:
    """Plot the increase of head's time over base's, in %.

    It shows the blocks and the mean of each placement, the estimate with its 99 % bounds, and the
    smallest relevant change.

    style: of the kernel. Raises ValueError if the comparison's lengths differ.
    """
    placements = placements_of(comparison)
    figure = go.Figure()
    figure.add_scatter(
        name="mean of the repeat",
        x=[p.mean for p in placements],
        y=[p.label for p in placements],
        mode="markers",
        marker={"color": style.color, "symbol": "diamond", "size": 11},
        hovertemplate="repeat of allocation %{y}<br>%{x:+.3f} %<extra>mean</extra>",
    )
    figure.add_scatter(
        name="block",
        x=[change for p in placements for change in p.blocks],
        y=[p.label for p in placements for _ in p.blocks],
        mode="markers",
        marker={"color": GREY, "symbol": "circle-open", "size": 7},
        hovertemplate="repeat of allocation %{y}<br>%{x:+.3f} %<extra>block</extra>",
    )
    figure.add_vline(0, line={"color": GREY, "width": 1.5})
    if math.isfinite(confirmation.log_ratio):
        low, estimate, high = (
            _percent(v) for v in (confirmation.low, confirmation.log_ratio, confirmation.high)
        )
        figure.add_vrect(
            low, high, fillcolor=style.color, opacity=0.18, line_width=0,
            name="99 % bounds", showlegend=True,
        )  # fmt: skip
        figure.add_vline(
            estimate, line={"color": style.color, "width": 2},
            name=f"estimate {estimate:+.2f} %", showlegend=True,
        )  # fmt: skip
        for sign in (1, -1):
            limit = _percent(sign * confirmation.smallest_change)
            figure.add_vline(
                limit, line={"color": GREY, "width": 1.5, "dash": "dash"},
                name="smallest change that counts", showlegend=sign > 0,
            )  # fmt: skip
    figure.update_xaxes(title="change of the time, head against base (%)", ticksuffix=" %")
    figure.update_yaxes(title="repeat of allocation", type="category", autorange="reversed")
    height = _AROUND_PX + _ROW_PX * max(len(placements), 1)
    return set_size(figure, height, legend=LEGEND_ABOVE)


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)
