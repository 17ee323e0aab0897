"""Charts of the accuracy loss by quantization."""

from __future__ import annotations

import html
from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import error_bars, rule, set_layout
from flexq_bench.dashboard.shared.colors import Style

_HEIGHT_PX = 420
_OUTLIER = 20  # times the median change, beyond which a change is left out of the axis
_SPREAD = 0.6  # fraction of the distance between tasks over which its schemes are spread


def losses(frame: pd.DataFrame, styles: Mapping[str, Style], title: str) -> go.Figure:
    """Plot the change against the unquantized model with its 95 % interval, by scheme and task.

    frame: see frame.difference_frame; metrics of one unit. title: of the axis, with the unit.
    """
    figure = _grouped(frame, "task", styles, "change", "low", "high")
    figure.update_xaxes(title="task")
    figure.update_yaxes(title=title)
    _leave_outliers_out(figure, frame)
    rule(figure, 0.0, "no change")
    return figure


def _leave_outliers_out(figure: go.Figure, frame: pd.DataFrame) -> None:
    """Limit the axis to changes of usual size, and name those beyond it."""
    sizes = frame["change"].abs()
    beyond = sizes > _OUTLIER * max(sizes.median(), 1e-9)
    inside = frame[~beyond]
    if not beyond.any() or len(inside) < len(frame) / 2:
        return
    low, high = inside["low"].min(), inside["high"].max()
    margin = 0.1 * (high - low)
    names = [f"{row.scheme} {row.change:+.0f}" for row in frame[beyond].itertuples()]
    figure.update_yaxes(range=[min(low, 0) - margin, max(high, 0) + margin])
    figure.add_annotation(
        text=html.escape(f"beyond this axis: {', '.join(names)}"),
        xref="paper", yref="paper", x=0, y=1, xanchor="left", showarrow=False,
    )  # fmt: skip


def errors_by_kind(frame: pd.DataFrame, styles: Mapping[str, Style]) -> go.Figure:
    """Plot the output error by kind of layer: median over layers, bars to minimum and maximum."""
    figure = _grouped(frame, "kind", styles, "median", "least", "most")
    figure.update_xaxes(title="kind of layer")
    figure.update_yaxes(title="relative squared output error (1, log scale)", type="log")
    return figure


def loss_history(frame: pd.DataFrame, styles: Mapping[str, Style], task: str) -> go.Figure:
    """Plot the change of perplexity over commits, a line per scheme; see frame.history_frame."""
    figure = go.Figure()
    for scheme, rows in frame.groupby("scheme"):
        style = styles[str(scheme)]
        figure.add_scatter(
            name=html.escape(str(scheme)),
            x=rows["place"],
            y=rows["change"],
            error_y=error_bars(rows["change"], rows["low"], rows["high"]),
            mode="lines+markers",
            line={"color": style.color, "width": 2},
            marker={"color": style.color, "symbol": style.symbol, "size": 9},
            hovertemplate="%{y:+.2f} %<extra>%{fullData.name}</extra>",
        )
    commits = frame.drop_duplicates("place")
    figure.update_xaxes(
        title="release, or commit",
        tickvals=commits["place"].tolist(),
        ticktext=[html.escape(name) for name in commits["commit"]],
    )
    figure.update_yaxes(title=f"perplexity on {html.escape(task)} against fp16 (%)")
    rule(figure, 0.0, "no change")
    return set_layout(figure, _HEIGHT_PX)


def _grouped(
    frame: pd.DataFrame,
    by: str,
    styles: Mapping[str, Style],
    value: str,
    low: str,
    high: str,
) -> go.Figure:
    groups = list(dict.fromkeys(frame[by]))
    schemes = sorted(frame["scheme"].unique())
    figure = go.Figure()
    for i, scheme in enumerate(schemes):
        rows = frame[frame["scheme"] == scheme]
        shift = _SPREAD * (i - (len(schemes) - 1) / 2) / max(len(schemes), 1)
        figure.add_scatter(
            name=html.escape(scheme),
            x=[groups.index(group) + shift for group in rows[by]],
            y=rows[value],
            error_y=error_bars(rows[value], rows[low], rows[high]),
            mode="markers",
            marker={"color": styles[scheme].color, "symbol": styles[scheme].symbol, "size": 10},
            hovertemplate="%{y:.4g}<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(
        tickvals=list(range(len(groups))),
        ticktext=[html.escape(str(group)) for group in groups],
        range=[-0.5, max(len(groups), 1) - 0.5],
        showgrid=False,
        zeroline=False,
    )
    return set_layout(figure, _HEIGHT_PX)
