"""Published numbers and ours as one table, each in columns of its own, and the chart of both."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dashboard.charts import GREY
from dashboard.paper_results import Ours
from db.reference_store import ReferenceInfo

_OURS = "#0072B2"
_ROW_PX = 30
_AROUND_PX = 150

# `published` is the paper's; ours, ours_low and ours_high are measured here, with a 95 % interval.
COLUMNS = {
    "source": "str",
    "table": "str",
    "metric": "str",
    "kernel": "str",
    "baseline": "str",
    "model": "str",
    "m": "str",
    "bound": "str",
    "published": "float64",
    "unit": "str",
    "hardware": "str",
    "ours": "float64",
    "ours_low": "float64",
    "ours_high": "float64",
    "gpu": "str",
    "cases": "int64",
    "apart": "int64",
    "differences": "str",
}


def paper_frame(rows: Sequence[tuple[ReferenceInfo, Sequence[Ours]]]) -> pd.DataFrame:
    """A row for each published number and GPU of ours, in the order given; one, where none is."""
    cells = [_cells(stated, one) for stated, measured in rows for one in (measured or (None,))]
    return pd.DataFrame(cells, columns=list(COLUMNS)).astype(COLUMNS)


def beside_each_other(frame: pd.DataFrame) -> go.Figure:
    """Ratios: the paper's as an open diamond, ours as a point with its interval; log axis.

    frame: see COLUMNS; rows that are no ratio are left out.
    """
    shown = frame[frame["unit"] == "×"]
    names = [html.escape(_name(row)) for row in shown.to_dict("records")]
    figure = go.Figure()
    figure.add_scatter(
        name="published",
        x=shown["published"].tolist(),
        y=names,
        mode="markers",
        marker={"color": GREY, "symbol": "diamond-open", "size": 11, "line": {"width": 2}},
        text=[_published(row) for row in shown.to_dict("records")],
        hovertemplate="%{text}<extra>published</extra>",
    )
    is_ours = shown["ours"].notna().tolist()
    ours = shown[is_ours]
    figure.add_scatter(
        name="ours",
        x=ours["ours"].tolist(),
        y=[name for name, here in zip(names, is_ours, strict=True) if here],
        error_x={
            "type": "data",
            "array": (ours["ours_high"] - ours["ours"]).tolist(),
            "arrayminus": (ours["ours"] - ours["ours_low"]).tolist(),
            "thickness": 1.5,
            "width": 4,
        },
        mode="markers",
        marker={"color": _OURS, "symbol": "circle", "size": 9},
        text=[_measured(row) for row in ours.to_dict("records")],
        hovertemplate="%{text}<extra>measured here</extra>",
    )
    figure.add_vline(1, line={"color": GREY, "width": 1})
    figure.update_xaxes(title="ratio (×, log scale)", type="log", dtick="D2")
    order = list(dict.fromkeys(names))[::-1]
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=order)
    figure.update_layout(
        height=_AROUND_PX + _ROW_PX * len(order),
        margin={"l": 10, "r": 40, "t": 60, "b": 10},
        modebar={"orientation": "v"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hoverlabel={"align": "left"},
    )
    return figure


def _cells(stated: ReferenceInfo, ours: Ours | None) -> dict[str, Any]:
    return {
        "source": stated.source,
        "table": stated.source_table,
        "metric": stated.metric,
        "kernel": stated.kernel,
        "baseline": stated.baseline,
        "model": " ".join(part for part in (stated.model, stated.task) if part),
        "m": "" if stated.m is None else str(stated.m),
        "bound": stated.bound,
        "published": stated.value,
        "unit": stated.unit,
        "hardware": stated.hardware or "not told",
        "ours": None if ours is None else ours.value.estimate,
        "ours_low": None if ours is None else ours.value.low,
        "ours_high": None if ours is None else ours.value.high,
        "gpu": "" if ours is None else ours.gpu,
        "cases": 0 if ours is None else ours.cases,
        "apart": 0 if ours is None else ours.apart,
        "differences": stated.note,
    }


def _name(row: Mapping[Any, Any]) -> str:
    paper = str(row["source"]).partition(",")[0]
    over = f"{row['kernel']} over {row['baseline']}"
    tokens = f"M = {row['m']}" if row["m"] else ""
    parts = (f"{paper}:", row["metric"], over, row["model"], tokens)
    return " ".join(str(part) for part in parts if part)


def _published(row: Mapping[Any, Any]) -> str:
    bound = f"{row['bound']} " if row["bound"] else ""
    return html.escape(f"{bound}{row['published']:g} × on {row['hardware']}: {row['table']}")


def _measured(row: Mapping[Any, Any]) -> str:
    return html.escape(
        f"{row['ours']:.4g} × ({row['ours_low']:.4g} to {row['ours_high']:.4g}) on {row['gpu']}, "
        f"{row['cases']} cases, {row['apart']} of separate runs"
    )
