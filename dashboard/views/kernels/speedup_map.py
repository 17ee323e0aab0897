"""Heat maps kernel × layer of the speed-up over a baseline, by M, as in FlexQ's Figure 10."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from flexq_bench.dashboard.shared.charts import set_size
from flexq_bench.dashboard.shared.layer_chart import Place, places_of

# Orange: slower, blue: faster. Distinguishable with colour vision deficiencies, also by lightness.
_COLORS = ("#B35806", "#FDB863", "#F7F7F7", "#92C5DE", "#2166AC")
_ROW_PX = 40
_BETWEEN_PX = 50
_AROUND_PX = 190
_BAR_PX = 420
_LABELS_PX = 110  # column names above the first map
_MAX_COLUMNS_WITH_INTERVALS = 22  # maximum number of columns for which cells show the interval
_TICKS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_BETWEEN_TICKS = (0.67, 0.8, 1.25, 1.5)  # added if all ratios are within 2 ×


def speedup_map(frame: pd.DataFrame, baseline: str) -> go.Figure:
    """Draw one map per M below each other, with a row per kernel and a column per layer.

    frame: see results_frame.COLUMNS, with one GPU, stage and cache mode; rows of the baseline and
    those without a speed-up are left out. A cell shows the ratio and half of its interval; with
    many columns the latter only on hover.
    Raises ValueError if GPUs are mixed or nothing is left.
    """
    shown = frame[frame["is_timed"] & frame["speedup"].notna() & (frame["label"] != baseline)]
    if shown.empty or shown["gpu"].nunique() > 1:
        raise ValueError("a map is of one GPU and needs a speed-up")
    shown = _at_layers(shown)
    tokens = sorted(shown["m"].unique())
    places = places_of(shown)
    maps = [_map(shown[shown["m"] == m], places) for m in tokens]
    rows = [len(heatmap.y) for heatmap in maps]
    above = _LABELS_PX if len(tokens) > 1 else 0
    height = _AROUND_PX + above + _ROW_PX * sum(rows) + _BETWEEN_PX * len(maps)
    figure = make_subplots(
        rows=len(tokens), cols=1, shared_xaxes=True, row_heights=rows,
        vertical_spacing=_BETWEEN_PX / height, subplot_titles=[f"M = {m}" for m in tokens],
    )  # fmt: skip
    for i, heatmap in enumerate(maps):
        figure.add_trace(heatmap, row=i + 1, col=1)
    widest = float(np.abs(np.log2(shown["speedup"])).max()) or 1.0
    named = _TICKS if widest > 1 else (*_TICKS, *_BETWEEN_TICKS)
    ticks = [tick for tick in named if abs(np.log2(tick)) <= widest * 1.001]
    set_size(
        figure,
        height,
        top=120 + above,
        coloraxis={
            "colorscale": [[i / 4, color] for i, color in enumerate(_COLORS)],
            "cmin": -widest,
            "cmax": widest,
            "colorbar": {
                "title": {"text": f"× {html.escape(baseline)}", "side": "top"},
                "orientation": "h",
                "len": _BAR_PX,
                "lenmode": "pixels",
                "thickness": 14,
                "x": 0,
                "xanchor": "left",
                "y": 1 + (_BETWEEN_PX + above) / (height - _AROUND_PX),
                "yanchor": "bottom",
                "tickvals": [float(np.log2(tick)) for tick in ticks],
                "ticktext": [f"{tick:g}" for tick in ticks],
            },
        },
    )
    # Beside the maps, because the column names are above the first one, and below the last one.
    figure.update_annotations(x=0, xanchor="right", xshift=-10)
    figure.update_xaxes(tickangle=-40, showgrid=False)
    if len(tokens) > 1:
        figure.update_xaxes(side="top", showticklabels=True, row=1, col=1)
    figure.update_xaxes(title="layer", row=len(tokens), col=1)
    figure.update_yaxes(showgrid=False)
    figure.update_yaxes(title="kernel", row=1, col=1)
    return figure


def widest_percent(frame: pd.DataFrame) -> float:
    """Return the largest half-width of the intervals, in percent of the speed-up."""
    halves = 50 * (frame["speedup_high"] - frame["speedup_low"]) / frame["speedup"]
    return float(halves.max())


def _at_layers(frame: pd.DataFrame) -> pd.DataFrame:
    """Move shapes without a model to the first layer of their size, if there is one.

    Rows measured as the layer itself come later, so that they take precedence in a cell.
    """
    bare = frame["model"] == ""
    named = {(place.n, place.k): place for place in reversed(places_of(frame[~bare]))}
    own = [_place(row) for row in frame.to_dict("records")]
    at = [place if place.model else named.get((place.n, place.k), place) for place in own]
    moved = frame.assign(model=[place.model for place in at], layer=[place.layer for place in at])
    return pd.concat([moved[bare], moved[~bare]])


def _map(rows: pd.DataFrame, places: list[Place]) -> go.Heatmap:
    labels = sorted(rows["label"].unique(), reverse=True)
    written = _text if len(places) <= _MAX_COLUMNS_WITH_INTERVALS else _ratio
    by_cell = {(row["label"], _place(row)): row for row in rows.to_dict("records")}
    cells = [[by_cell.get((label, place)) for place in places] for label in labels]
    return go.Heatmap(
        z=[[np.log2(cell["speedup"]) if cell else None for cell in line] for line in cells],
        x=[html.escape(place.name) for place in places],
        y=[html.escape(label) for label in labels],
        text=[[written(cell) if cell else "" for cell in line] for line in cells],
        texttemplate="%{text}",
        textfont={"size": 10},
        customdata=[[_hover(cell) if cell else "not measured" for cell in line] for line in cells],
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
        coloraxis="coloraxis",
        xgap=2,
        ygap=2,
    )


def _place(row: Mapping[Any, Any]) -> Place:
    return Place(str(row["model"]), str(row["layer"]), int(row["n"]), int(row["k"]))


def _ratio(cell: Mapping[Any, Any]) -> str:
    marks = ("" if cell["one_run"] else "†") + ("~" if cell["status"] == "noisy" else "")
    return f"{cell['speedup']:.2f}{marks}"


def _text(cell: Mapping[Any, Any]) -> str:
    half_percent = 50 * (cell["speedup_high"] - cell["speedup_low"]) / cell["speedup"]
    return f"{_ratio(cell)}<br>±{half_percent:.1f} %"


def _hover(cell: Mapping[Any, Any]) -> str:
    where = (
        "in one run"
        if cell["one_run"]
        else f"in separate runs, with the noise of both ({cell.get('noise', 'not known')})"
    )
    noisy = "<br>noisy: its own interval did not converge" if cell["status"] == "noisy" else ""
    return (
        f"<b>{html.escape(str(cell['label']))}</b><br>"
        f"{html.escape(_place(cell).name)}<br>M={cell['m']} N={cell['n']} K={cell['k']}<br>"
        f"{cell['speedup']:.4g} × ({cell['speedup_low']:.4g} to {cell['speedup_high']:.4g}), "
        f"{where}<br>median {cell['median_us']:.5g} µs ±{cell['half_width_pct']:.2g} % in its run"
        f"{noisy}"
    )
