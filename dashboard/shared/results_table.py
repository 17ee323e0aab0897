"""Table of results on a page."""

from __future__ import annotations

from datetime import tzinfo
from typing import Any

import pandas as pd
import streamlit as st

from flexq_bench.dashboard.shared.formatting import as_text, short_commit
from flexq_bench.dashboard.shared.tables import draw_table
from flexq_bench.db.records import LINEAR

_STATUS_LABELS = {"incorrect": "✗ incorrect", "failed": "✗ failed", "unsupported": "– unsupported"}
_ALWAYS = (
    *("median_us", "half_width_pct", "pct_of_floor", "tops", "speedup"),
    *("correct", "status", "commit", "gpu"),
)
_IF_VARYING = ("stage", "cache", "run", "detail")
READ_HELP = (
    "100 · time to read the packed weights, or all inputs that must be read / time. A bound where "
    "launches overlap, since the read overlaps too; else a reference, which overlap may exceed"
)
_TIME_HELP = "of a launch: a trimmed mean on a GPU; the median on a CPU, or before protocol 4"


def show_table(frame: pd.DataFrame, baseline: str, zone: tzinfo) -> None:
    """Show one row per result; columns with a single value are left out."""
    table = frame.assign(
        status=[_STATUS_LABELS.get(status, status) for status in frame["status"]],
        commit=[
            short_commit(sha, dirty)
            for sha, dirty in zip(frame["commit"], frame["dirty"], strict=True)
        ],
        run=frame["run"].str[:8],
        created_at=frame["created_at"].dt.tz_convert(zone),
    )
    optional = [name for name in _IF_VARYING if frame[name].nunique() > 1]
    draw_table(
        table,
        column_order=[
            "label",
            "model",
            "layer",
            *shape_columns(frame),
            *_ALWAYS,
            *optional,
            "created_at",
        ],
        column_config=_columns(baseline),
        key="results-table",
    )


def shape_columns(frame: pd.DataFrame) -> tuple[str, ...]:
    """Return the columns of a results frame that give the shape: M, N and K of linear layers."""
    if (frame["operation"] == LINEAR).all():
        return ("m", "n", "k")
    return ("operation", "parameters") if frame["operation"].nunique() > 1 else ("parameters",)


def _columns(baseline: str) -> dict[str, Any]:
    column = st.column_config
    return {
        "label": column.TextColumn("kernel", pinned=True),
        "m": column.NumberColumn("M", format="%d", help="tokens"),
        "n": column.NumberColumn("N", format="%d", help="output features"),
        "k": column.NumberColumn("K", format="%d", help="input features"),
        "parameters": column.TextColumn("shape"),
        "median_us": column.NumberColumn("time µs", format="%.2f", help=_TIME_HELP),
        "half_width_pct": column.NumberColumn(
            "± %", format="%.2f", help="half the 95 % interval, in percent of the time"
        ),
        "pct_of_floor": column.NumberColumn(
            "% of read",
            format="%.1f",
            help=READ_HELP,
        ),
        "tops": column.NumberColumn(
            "TOPS", format="%.2f", help="operations / time, 10¹²/s; 2·M·N·K of a GEMM"
        ),
        "speedup": column.NumberColumn(
            f"× {baseline}",
            format="%.2f",
            help=f"time of {as_text(baseline)} / time, in the same run",
        ),
        "correct": column.TextColumn("correct", help="exact: all integer results are bit-exact"),
        "commit": column.TextColumn("commit", help="+: the tree had changes"),
        "gpu": column.TextColumn("GPU"),
        "created_at": column.DatetimeColumn("measured", format="YYYY-MM-DD HH:mm"),
    }
