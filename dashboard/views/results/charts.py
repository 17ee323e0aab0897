"""Charts of results by layer: speed-up, and percentage of the floor."""

from __future__ import annotations

import html
from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import log_axis, rule
from flexq_bench.dashboard.shared.colors import Style
from flexq_bench.dashboard.shared.layer_chart import by_layer


def speedup_by_layer(frame: pd.DataFrame, baseline: str, styles: Mapping[str, Style]) -> go.Figure:
    """Plot the speed-up over the baseline with its interval by kernel and layer, log axis.

    frame: see results_frame.COLUMNS, with one GPU, run, stage, cache and M; rows that are incorrect
    or have no time are left out. The baseline is the line at 1. Raises ValueError if the frame has
    several of these.
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
    """Plot the percentage of the floor with its interval by kernel and layer.

    frame: as in `speedup_by_layer`. 100 % is the time of reading the packed weights only.
    """
    figure = by_layer(_comparable(frame, "pct_of_floor"), "pct_of_floor", " %", styles)
    figure.update_yaxes(title="floor / time (%)", rangemode="tozero")
    rule(figure, 100.0, "reading the weights = 100 %")
    return figure


def _comparable(frame: pd.DataFrame, value: str) -> pd.DataFrame:
    shown = frame[frame["is_timed"] & frame[value].notna()]
    for column in ("backend", "gpu", "run", "stage", "cache", "m"):
        if shown[column].nunique() > 1:
            values = ", ".join(str(v) for v in shown[column].unique())
            raise ValueError(f"one chart is of one {column}, got {values}: draw one for each")
    return shown
