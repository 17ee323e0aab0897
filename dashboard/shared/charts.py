"""Parts of charts: colours of rules, logarithmic axes, error bars, layout."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections.abc import Iterable
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

GREY = "#8A8F98"  # of rules and their words: readable on white and on dark grey
_NAMED = 8  # series, in a description
_LINE = 36  # letters of a line of an axis's title, or of a name in a legend
WIDE = 8  # largest over smallest ratio, from where an axis shows whole decades


def log_axis(values: Iterable[float]) -> dict[str, Any]:
    """A logarithmic axis for these values, > 0: it names 1, 2 and 5 of each decade where they are
    far apart, each in full. Plotly's own names of them leave the zeros away."""
    shown = [value for value in values if value > 0]
    if max(shown, default=1.0) <= WIDE * min(shown, default=1.0):
        return {"type": "log"}
    decades = range(math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown))) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}


def rule(figure: go.Figure, at: float, words: str) -> None:
    """A dashed line at a height, named in the legend."""
    line = {"color": GREY, "width": 1.5, "dash": "dash"}
    figure.add_hline(at, line=line, name=words, showlegend=True)


def error_bars(
    values: pd.Series[Any], low: pd.Series[Any], high: pd.Series[Any], *, width: int | None = None
) -> dict[str, Any]:
    """Error bars of Plotly from each value to the ends of its interval.

    width: of the caps, pixels; None: as Plotly has it.
    """
    return {
        "type": "data",
        "array": (high - values).tolist(),
        "arrayminus": (values - low).tolist(),
        "thickness": 1.5,
    } | ({} if width is None else {"width": width})


def draw_chart(figure: go.Figure, key: str, **options: Any) -> Any:
    """A chart on the page, with its description for who does not see it.

    options: as st.plotly_chart takes them, and what it returns.
    """
    figure.for_each_xaxis(lambda axis: axis.title.update(text=in_lines(axis.title.text or "")))
    return st.plotly_chart(figure, key=key, alt=described(figure), **options)


def in_lines(text: str) -> str:
    """Text of a chart in lines that a phone has room for: Plotly breaks none by itself."""
    return "<br>".join(textwrap.wrap(text, _LINE, break_long_words=False))


def described(figure: go.Figure) -> str:
    """A sentence: what is drawn over what, which series there are, and between which values."""
    spec = figure.to_dict()
    layout = spec.get("layout", {})
    axes = [_words(layout.get(f"{axis}axis", {}).get("title", {}).get("text")) for axis in "yx"]
    names = [_words(trace.get("name")) for trace in spec.get("data", ())]
    series = list(dict.fromkeys(name for name in names if name))
    what = " over ".join(axis for axis in axes if axis) or "A chart"
    more = f" and {len(series) - _NAMED} more" if len(series) > _NAMED else ""
    of = f" of {', '.join(series[:_NAMED])}{more}" if series else ""
    return f"{what}{of}. The tables of this page have the values."


def _words(text: object) -> str:
    """Text of a chart without its markup."""
    return html.unescape(re.sub(r"<[^>]*>", " ", str(text or ""))).strip()


def lay_out(figure: go.Figure, height: int) -> go.Figure:
    """The figure with its legend below the chart; height: pixels."""
    return figure.update_layout(
        height=height,
        margin={"l": 10, "r": 40, "t": 20, "b": 10},
        modebar={"orientation": "v"},
        # Of the whole figure, not of the axes: tick labels that turn in a narrow window need room.
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        showlegend=True,
        hoverlabel={"align": "left"},
    )
