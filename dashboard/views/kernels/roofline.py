"""Roofline of one GPU: throughput of kernels, bounded by the rate of reading weights."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import GREY, LEGEND_ABOVE, error_bars, log_axis, set_size
from flexq_bench.dashboard.shared.colors import Style

_HEIGHT_PX = 480
_LEGEND_ROW_PX = 20
_KERNELS_PER_LEGEND_ROW = 3
_SPREAD = 1.25  # factor in x over which kernels of equal intensity are spread


def roofline_frame(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the timed rows that have a floor, with the coordinates of a roofline.

    frame: see results_frame.COLUMNS. Added columns: `intensity`, operations per byte of weight
    codes; `reach`, `reach_low`, `reach_high`, 10¹² operations/s with the 95 % interval; `reading`,
    GB/s of weight codes read by the floor; `roof`, 10¹² operations/s at the floor.
    """
    shown = frame[frame["is_timed"] & frame["floor_us"].notna()].copy()
    operations = 2.0 * shown["m"] * shown["n"] * shown["k"]
    code_bytes = shown["n"] * shown["k"] * shown["weight_bits"] / 8
    shown["intensity"] = operations / code_bytes
    for name, time in (("", "median_us"), ("_low", "ci_high_us"), ("_high", "ci_low_us")):
        shown[f"reach{name}"] = operations / shown[time].fillna(shown["median_us"]) / 1e6
    shown["reading"] = code_bytes / shown["floor_us"] / 1e3
    shown["roof"] = operations / shown["floor_us"] / 1e6
    return shown


def roofline(points: pd.DataFrame, styles: Mapping[str, Style]) -> go.Figure:
    """Plot the points of each kernel with intervals and the roof, both axes logarithmic.

    points: of `roofline_frame`, with one GPU, stage and cache mode. The roof is a band: the floor
    reads large matrices at a higher rate than small ones. Raises ValueError if GPUs are mixed.
    """
    if points["gpu"].nunique() > 1:
        raise ValueError("a roofline is of one GPU: draw one for each")
    figure = go.Figure()
    _add_roof(figure, points)
    labels = sorted(points["label"].unique())
    for i, name in enumerate(labels):
        rows = points[points["label"] == name]
        # Kernels of one weight width have the same intensity: spread them horizontally.
        shift = _SPREAD ** ((i - (len(labels) - 1) / 2) / len(labels))
        style = styles[name]
        figure.add_scatter(
            name=html.escape(name),
            x=(rows["intensity"] * shift).tolist(),
            y=rows["reach"].tolist(),
            error_y=error_bars(rows["reach"], rows["reach_low"], rows["reach_high"], width=3),
            mode="markers",
            marker={
                "color": style.color,
                "symbol": style.symbol,
                "size": 9,
                "line": {
                    "color": GREY,
                    "width": [3 if noisy else 0 for noisy in rows["status"] == "noisy"],
                },
            },
            text=[_hover(row) for row in rows.to_dict("records")],
            hovertemplate=f"<b>{html.escape(name)}</b><br>%{{text}}<extra></extra>",
        )
    figure.update_xaxes(
        title="arithmetic intensity (operations per byte of weights, log scale)",
        showgrid=True,
        **log_axis(points["intensity"]),
    )
    figure.update_yaxes(
        title="10¹² operations a second (TOPS, log scale)", **log_axis(points["reach"])
    )
    return set_size(
        figure,
        _HEIGHT_PX + _LEGEND_ROW_PX * (len(labels) // _KERNELS_PER_LEGEND_ROW),
        top=70,
        legend=LEGEND_ABOVE,
        showlegend=True,
        hoverlabel={"align": "left"},
    )


def _add_roof(figure: go.Figure, points: pd.DataFrame) -> None:
    low, high = float(points["reading"].min()), float(points["reading"].max())
    ends = [points["intensity"].min() / 1.3, points["intensity"].max() * 1.3]
    at_least, at_most = ([x * rate / 1e3 for x in ends] for rate in (low, high))
    figure.add_scatter(
        x=[*ends, *reversed(ends)],
        y=[*at_least, *reversed(at_most)],
        fill="toself",
        fillcolor=GREY,
        opacity=0.25,
        mode="none",
        hoverinfo="skip",
        name=f"floors of these shapes: reading at {low:,.0f} to {high:,.0f} GB/s",
    )
    figure.add_scatter(
        x=ends,
        y=at_most,
        mode="lines",
        line={"color": GREY, "width": 1.5, "dash": "dash"},
        hoverinfo="skip",
        name=f"the fastest of them, {high:,.0f} GB/s",
    )


def _hover(row: Mapping[Any, Any]) -> str:
    name = html.escape(" ".join(str(row[part]) for part in ("model", "layer") if row[part]))
    noisy = "<br>~ noisy: its own interval did not converge" if row["status"] == "noisy" else ""
    return (
        f"{name}<br>M={row['m']} N={row['n']} K={row['k']}<br>"
        f"{row['reach']:.4g} TOPS ({row['reach_low']:.4g} to {row['reach_high']:.4g})<br>"
        f"its floor {row['roof']:.4g} TOPS, reading at {row['reading']:,.0f} GB/s<br>"
        f"median {row['median_us']:.5g} µs, {row['pct_of_floor']:.1f} % of the floor{noisy}"
    )
