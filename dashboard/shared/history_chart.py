"""Chart of histories: values over commits, with their intervals and epochs."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import (
    GREY,
    MAX_PLAIN_RATIO,
    log_axis,
    set_layout,
    wrap_text,
)
from flexq_bench.dashboard.shared.colors import Style
from flexq_bench.dashboard.shared.formatting import short_commit

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_MAX_COMMIT_LABELS = 24  # tick labels of commits
_HEIGHT_PX = 440
_LEGEND_PX = 48  # per series: its name has three lines
_MAX_MARKERS = 60  # per epoch; points without a marker can be hovered and clicked too


def history(
    frame: pd.DataFrame,
    styles: Mapping[str, Style],
    value: str,
    unit: str,
    *,
    by_date: bool = False,
) -> go.Figure:
    """Draw a line per series with a band of 95 % intervals; a dashed line marks a new epoch.

    frame: see history_frame.COLUMNS. Series of one kernel have its colour and differ in their dash.
    value, unit: of the axis, for example "time" and "µs". The axis is logarithmic if the
    values are far apart. Lines are interrupted between epochs. The custom data of a point is the
    uuid of its measurement. by_date: x is the time of measurement instead of the ancestry of
    commits.
    """
    figure = go.Figure()
    drawn: dict[str, int] = {}
    for _, rows in frame.groupby("series", sort=False):
        label, name = str(rows["label"].iloc[0]), str(rows["name"].iloc[0])
        dash = _DASHES[drawn.get(label, 0) % len(_DASHES)]
        drawn[label] = drawn.get(label, 0) + 1
        # Plotly interprets HTML in names.
        x = "created_at" if by_date else "place"
        ordered = rows.sort_values(x, kind="stable")
        _add_series(figure, wrap_text(html.escape(name)), ordered, styles[label], dash, unit, x)
    for at in sorted(_epoch_starts(frame)):
        where = frame.loc[frame["place"] == at, "created_at"].min() if by_date else at - 0.5
        figure.add_vline(where, line={"color": GREY, "width": 1.5, "dash": "dash"})
    if by_date:
        figure.update_xaxes(title="measured", zeroline=False)
    else:
        _name_commits(figure, frame)
    is_wide = frame["value"].max() > MAX_PLAIN_RATIO * frame["value"].min() > 0
    figure.update_yaxes(
        title=f"{value} ({unit}{', log scale' if is_wide else ''})",
        **(log_axis(frame["value"]) if is_wide else {}),
    )
    return set_layout(figure, _HEIGHT_PX + _LEGEND_PX * frame["series"].nunique())


def _name_commits(figure: go.Figure, frame: pd.DataFrame) -> None:
    commits = frame.drop_duplicates("place").sort_values("place")
    shown = commits.iloc[:: max(1, -(-len(commits) // _MAX_COMMIT_LABELS))]
    figure.update_xaxes(
        title="commit, by ancestry",
        tickvals=shown["place"].tolist(),
        ticktext=[html.escape(short_commit(sha, dirty=False)) for sha in shown["commit"]],
        zeroline=False,
    )


def _add_series(
    figure: go.Figure, name: str, rows: pd.DataFrame, style: Style, dash: str, unit: str, x: str
) -> None:
    for position, (epoch, part) in enumerate(rows.groupby("epoch", sort=False)):
        is_single = len(part) == 1  # a band needs two points
        if not is_single:
            figure.add_scatter(
                x=pd.concat([part[x], part[x][::-1]]),
                y=np.concatenate([part["high"], part["low"][::-1]]),
                fill="toself",
                fillcolor=style.color,
                opacity=0.2,
                mode="none",
                hoverinfo="skip",
                legendgroup=name,
                showlegend=False,
            )
        figure.add_scatter(
            name=name,
            x=part[x],
            y=part["value"],
            error_y=_bar(part) if is_single else None,
            mode="lines+markers",
            line={"color": style.color, "width": 2, "dash": dash},
            marker={
                "color": style.color,
                "symbol": style.symbol,
                "size": 8,
                "maxdisplayed": _MAX_MARKERS,
            },
            text=[_hover(row) for row in part.to_dict("records")],
            customdata=part["measurement"],
            # Text common to all points is sent once, not with each of 2,400 points.
            hovertemplate=f"<b>{name}</b><br>%{{y:.5g}} {unit} %{{text}}<br>epoch {epoch}"
            "<extra></extra>",
            legendgroup=name,
            showlegend=position == 0,
        )


def _epoch_starts(frame: pd.DataFrame) -> set[int]:
    """Return the places at which a series begins a new epoch."""
    starts: set[int] = set()
    for _, rows in frame.groupby("series", sort=False):
        is_new = rows["epoch"].ne(rows["epoch"].shift()) & rows["epoch"].shift().notna()
        starts.update(int(place) for place in rows.loc[is_new, "place"])
    return starts


def _bar(point: pd.DataFrame) -> dict[str, Any]:
    return {
        "type": "data",
        "array": point["high"] - point["value"],
        "arrayminus": point["value"] - point["low"],
    }


def _hover(row: Mapping[Any, Any]) -> str:
    return (
        f"({row['low']:.5g} to {row['high']:.5g})<br>"
        + html.escape(
            f"commit {short_commit(str(row['commit']), dirty=False)}, run {str(row['run'])[:8]}"
        )
        + (f"<br>{html.escape(str(row['subject'])[:80])}" if row["subject"] else "")
    )
