"""Charts of the raw samples of one measurement, and of its device's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import GREY, set_size
from flexq_bench.dashboard.shared.colors import Style
from flexq_bench.db.queries import ResultRow

Placements = Sequence[Sequence[float]]
_MAX_POINTS = 4000  # maximum drawn: more take a browser seconds without showing more
_HEIGHT_PX = 380
_INVALID = "#B44B4B"


def ecdf(samples: Placements, result: ResultRow, style: Style) -> go.Figure:
    """Draw the ECDF of the samples' times, over all and for each placement.

    samples: [placements][samples], µs. The band is the 95 % interval of the time.
    """
    figure = go.Figure()
    for i, values in enumerate(samples):
        times, shares = _steps(values)
        figure.add_scatter(
            name="each repeat of allocation",
            x=times,
            y=shares,
            mode="lines",
            line={"color": GREY, "width": 1, "shape": "hv"},
            opacity=0.5,
            hovertemplate=f"repeat {i + 1}<br>%{{y:.1f}} % took at most %{{x:.5g}} µs"
            "<extra></extra>",
            legendgroup="placement",
            showlegend=i == 0,
        )
    times, shares = _steps([value for values in samples for value in values])
    figure.add_scatter(
        name="all samples",
        x=times,
        y=shares,
        mode="lines",
        line={"color": style.color, "width": 2.5, "shape": "hv"},
        hovertemplate="%{y:.1f} % took at most %{x:.5g} µs<extra></extra>",
    )
    _mark_time(figure, result, style, axis="x")
    figure.update_xaxes(title="time of a launch (µs)")
    figure.update_yaxes(title="share of the samples (%)", range=[0, 101])
    return _set_layout(figure)


def order_plot(
    samples: Placements,
    invalid: Sequence[Sequence[int]],
    times_us: Sequence[float],
    result: ResultRow,
    style: Style,
) -> go.Figure:
    """Plot the samples in measurement order, with the stored time of each placement.

    samples: as in `ecdf`. invalid: [placements] indices of samples with too low a clock. times_us:
    of the placements that have other samples. Of very many samples the minimum and maximum of
    neighbours are drawn, which keeps all outliers.
    """
    figure = go.Figure()
    start = 0
    stored_us = iter(times_us)
    for i, values in enumerate(samples):
        places = start + 1 + np.arange(len(values))
        bad = set(invalid[i]) if i < len(invalid) else set()
        kept = _envelope(values, -(-sum(map(len, samples)) // _MAX_POINTS))
        for name, symbol, color, chosen in (
            ("sample", "circle", style.color, [j for j in kept if j not in bad]),
            ("at too low a clock, not counted", "x", _INVALID, sorted(bad)),
        ):
            figure.add_scatter(
                name=name,
                x=places[chosen],
                y=[values[j] for j in chosen],
                mode="markers",
                marker={"color": color, "symbol": symbol, "size": 4 if symbol == "circle" else 7},
                opacity=0.6,
                hovertemplate=f"sample %{{x}}, placement {i + 1}<br>%{{y:.5g}} µs<extra></extra>",
                legendgroup=name,
                showlegend=bool(chosen) and not any(t.name == name for t in figure.data),
            )
        time_us = next(stored_us, None) if len(bad) < len(values) else None
        if time_us is not None:
            figure.add_scatter(
                name="time of the repeat",
                x=[places[0], places[-1]],
                y=[time_us, time_us],
                mode="lines",
                line={"color": GREY, "width": 3},
                hovertemplate=f"repeat {i + 1}<br>{time_us:.5g} µs<extra></extra>",
                legendgroup="time",
                showlegend=not any(t.name == "time of the repeat" for t in figure.data),
            )
        start += len(values)
    _mark_time(figure, result, style, axis="y")
    figure.update_xaxes(title="sample, in the order measured (count)")
    figure.update_yaxes(title="time of a launch (µs)")
    return _set_layout(figure)


def clock_plot(readings: Mapping[str, Mapping[str, Any]]) -> go.Figure:
    """Plot the SM clock before, during and after the measurement; each is a single reading."""
    known = {when: state["sm_clock_mhz"] for when, state in readings.items()}
    figure = go.Figure(
        go.Scatter(
            x=list(known),
            y=list(known.values()),
            mode="lines+markers",
            line={"color": GREY, "width": 2},
            marker={"size": 10},
            hovertemplate="%{x}<br>%{y:.0f} MHz<extra></extra>",
        )
    )
    figure.update_xaxes(title="when it was read")
    figure.update_yaxes(title="SM clock (MHz)", rangemode="tozero")
    return _set_layout(figure)


def _steps(values: Sequence[float]) -> tuple[list[float], list[float]]:
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    shares = 100.0 * np.arange(1, ordered.size + 1) / max(ordered.size, 1)
    shown = np.unique(np.linspace(0, ordered.size - 1, min(ordered.size, _MAX_POINTS)).astype(int))
    return ordered[shown].tolist(), shares[shown].tolist()


def _envelope(values: Sequence[float], stride: int) -> list[int]:
    """Return the indices of minimum and maximum of each 2 * stride neighbours; stride 1: all."""
    if stride <= 1:
        return list(range(len(values)))
    array = np.asarray(values, dtype=np.float64)
    kept: set[int] = set()
    for start in range(0, array.size, 2 * stride):
        part = array[start : start + 2 * stride]
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
    return sorted(kept)


def _mark_time(figure: go.Figure, result: ResultRow, style: Style, *, axis: str) -> None:
    if result.median_us is None:
        return
    line, band = (
        (figure.add_vline, figure.add_vrect)
        if axis == "x"
        else (figure.add_hline, figure.add_hrect)
    )
    if result.ci_low_us is not None and result.ci_high_us is not None:
        band(
            result.ci_low_us, result.ci_high_us, fillcolor=style.color, opacity=0.2, line_width=0,
            name="95 % interval of the time", showlegend=True,
        )  # fmt: skip
    line(
        result.median_us, line={"color": GREY, "width": 1.5, "dash": "dash"},
        name=f"time {result.median_us:.5g} µs", showlegend=True,
    )  # fmt: skip


def _set_layout(figure: go.Figure) -> go.Figure:
    legend = {"orientation": "h", "y": -0.25, "yanchor": "top", "x": 0}
    return set_size(figure, _HEIGHT_PX, legend=legend, hoverlabel={"align": "left"})
