"""Charts of results: speed-up and share of the floor by layer."""

from __future__ import annotations

import html
from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from dashboard.shared.charts import log_axis, rule
from dashboard.shared.colors import Style
from dashboard.shared.layer_chart import by_layer


def speedup_by_layer(frame: pd.DataFrame, baseline: str, styles: Mapping[str, Style]) -> go.Figure:
    """Speed-up over the baseline with its interval, a point for each kernel and layer, log axis.

    frame: see results_frame.COLUMNS, of one GPU, run, stage, cache and M; rows that were wrong
    or never timed are left out, and so is the baseline, which is the line at 1. Raises ValueError
    if the frame mixes what must not stand in one chart.
    """
    shown = _comparable(frame, "speedup")
    figure = by_layer(shown[shown["label"] != baseline], "speedup", "×", styles)
    figure.update_yaxes(
        title=f"speed-up over {html.escape(baseline)} (×, log scale)",
        **log_axis([*shown["speedup"], 1.0]),
    )
    rule(figure, 1.0, f"{html.escape(baseline)} = 1")
    return figure


def floor_by_layer(frame: pd.DataFrame, styles: Mapping[str, Style]) -> go.Figure:
    """Share of the floor with its interval, a point for each kernel and layer.

    frame: as in `speedup_by_layer`. 100 % is as fast as merely reading the packed weights.
    """
    figure = by_layer(_comparable(frame, "pct_of_floor"), "pct_of_floor", " %", styles)
    figure.update_yaxes(title="floor / median (%)", rangemode="tozero")
    rule(figure, 100.0, "reading the weights = 100 %")
    return figure


def _comparable(frame: pd.DataFrame, value: str) -> pd.DataFrame:
    shown = frame[frame["is_timed"] & frame[value].notna()]
    for column in ("backend", "gpu", "run", "stage", "cache", "m"):
        if shown[column].nunique() > 1:
            values = ", ".join(str(v) for v in shown[column].unique())
            raise ValueError(f"one chart is of one {column}, got {values}: draw one for each")
    return shown
