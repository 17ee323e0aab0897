"""Parts of charts: colours of rules, logarithmic axes, error bars, layout."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np
import plotly.graph_objects as go
import streamlit as st
from numpy.typing import ArrayLike

GREY = "#8A8F98"  # lines and their labels: readable on white and on dark grey
LEGEND_ABOVE = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
_MAX_NAMED_SERIES = 8  # series named in a description
_MAX_LINE_LENGTH = 36  # characters per line of an axis title or legend entry
_MIN_RATIO = 1.5  # between the ends of a logarithmic axis and its values, if these are close
# max / min of the values above which a log axis has ticks at 1, 2 and 5 of each decade.
MAX_PLAIN_RATIO = 8


def log_axis(values: Iterable[float]) -> dict[str, Any]:
    """Return a logarithmic axis for these values, > 0.

    If max / min exceeds MAX_PLAIN_RATIO, ticks are at 1, 2 and 5 of each decade, with their full
    values as labels; Plotly's own labels would be the digit only.
    """
    shown = [value for value in values if value > 0]
    least, most = min(shown, default=1.0), max(shown, default=1.0)
    if most <= _MIN_RATIO * least:  # or noise would fill the axis
        ends = math.log10(least / _MIN_RATIO), math.log10(most * _MIN_RATIO)
        return {"type": "log", "range": list(ends)}
    if most <= MAX_PLAIN_RATIO * least:
        return {"type": "log"}
    decades = range(math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown))) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}


def rule(figure: go.Figure, at: float, words: str) -> None:
    """Add a dashed horizontal line at y = `at`, with a legend entry."""
    line = {"color": GREY, "width": 1.5, "dash": "dash"}
    figure.add_hline(at, line=line, name=words, showlegend=True)


def error_bars(
    values: ArrayLike, low: ArrayLike, high: ArrayLike, *, width: int | None = None
) -> dict[str, Any]:
    """Return Plotly error bars from each value to the ends of its interval.

    width: of the caps, pixels; None: Plotly's default.
    """
    return {
        "type": "data",
        "array": np.subtract(high, values).tolist(),
        "arrayminus": np.subtract(values, low).tolist(),
        "thickness": 1.5,
    } | ({} if width is None else {"width": width})


def draw_chart(figure: go.Figure, key: str, **options: Any) -> Any:
    """Show a chart with an alternative text for screen readers.

    options: of st.plotly_chart, whose result is returned.
    """
    figure.for_each_xaxis(lambda axis: axis.title.update(text=wrap_text(axis.title.text or "")))
    return st.plotly_chart(figure, key=key, alt=alternative_text(figure), **options)


def wrap_text(text: str) -> str:
    """Break text of a chart into lines that fit a phone: Plotly does not wrap text."""
    return "<br>".join(textwrap.wrap(text, _MAX_LINE_LENGTH, break_long_words=False))


def alternative_text(figure: go.Figure) -> str:
    """Return an alternative text: the axes and the series of a chart."""
    spec = figure.to_dict()
    layout = spec.get("layout", {})
    axes = [
        _plain_text(layout.get(f"{axis}axis", {}).get("title", {}).get("text")) for axis in "yx"
    ]
    names = [_plain_text(trace.get("name")) for trace in spec.get("data", ())]
    series = list(dict.fromkeys(name for name in names if name))
    quantities = " over ".join(axis for axis in axes if axis) or "A chart"
    more = f" and {len(series) - _MAX_NAMED_SERIES} more" if len(series) > _MAX_NAMED_SERIES else ""
    of_series = f" of {', '.join(series[:_MAX_NAMED_SERIES])}{more}" if series else ""
    return f"{quantities}{of_series}. The tables of this page have the values."


def _plain_text(text: object) -> str:
    """Return text of a chart without markup."""
    return html.unescape(re.sub(r"<[^>]*>", " ", str(text or ""))).strip()


def set_size(
    figure: go.Figure, height: int, *, top: int = 20, bottom: int = 10, **layout: Any
) -> go.Figure:
    """Set height and margins of a figure, pixels. layout: other attributes of its layout."""
    return figure.update_layout(
        height=height,
        margin={"l": 10, "r": 40, "t": top, "b": bottom},
        modebar={"orientation": "v"},
        **layout,
    )


def set_layout(figure: go.Figure, height: int) -> go.Figure:
    """Set the layout of a figure: the legend is below the chart. height: pixels."""
    return set_size(
        figure,
        height,
        # Relative to the figure, not to the axes: rotated tick labels in a narrow window need room.
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        showlegend=True,
        hoverlabel={"align": "left"},
    )
