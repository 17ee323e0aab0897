"""Tables of two compared sides, and their CSV."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from flexq_bench.dashboard.shared.results_table import shape_columns
from flexq_bench.dashboard.shared.spreadsheet import to_csv
from flexq_bench.dashboard.shared.tables import SHAPE_COLUMNS, draw_table, offer_csv

_MAX_HEIGHT_PX = 760


def show_means(means: pd.DataFrame) -> None:
    """Show the table of geometric means."""
    st.header("Geometric means", anchor=False)
    number = st.column_config.NumberColumn
    draw_table(
        means,
        column_config={
            "gpu": "GPU",
            "parameters": "shape",
            "label": "kernel",
            "ratio": number("head / base", format="%.4f", help="below 1: head is faster"),
            "ratio_low": number("low", format="%.4f"),
            "ratio_high": number("high", format="%.4f"),
        },
        key="means",
    )
    st.caption(
        "Geometric mean of head / base over the cases. Its interval is the measurement uncertainty "
        "for exactly these cases, not the spread between cases."
    )


_ENDS_HELP = "end of the interval; the column evidence names its kind"


def show_rows(frame: pd.DataFrame) -> None:
    """Show one row per case, worst first, and a CSV download."""
    st.header("Cases", anchor=False)
    number = st.column_config.NumberColumn
    table = frame.assign(
        change=100 * (frame["ratio"] - 1),
        low=100 * (frame["ratio_low"] - 1),
        high=100 * (frame["ratio_high"] - 1),
    )
    draw_table(
        table,
        max_px=_MAX_HEIGHT_PX,
        column_order=[
            *("label", "model", "layer", *shape_columns(frame), "stage", "cache", "gpu"),
            *("base_us", "head_us", "change", "low", "high", "verdict", "evidence", "reason"),
        ],
        column_config=SHAPE_COLUMNS
        | {
            "label": st.column_config.TextColumn("kernel", pinned=True),
            "gpu": "GPU",
            "base_us": number("base µs", format="%.2f"),
            "head_us": number("head µs", format="%.2f"),
            "change": number("change %", format="%+.2f"),
            "low": number("low %", format="%+.2f", help=_ENDS_HELP),
            "high": number("high %", format="%+.2f", help=_ENDS_HELP),
        },
        key="cases",
    )
    offer_csv(to_csv(frame), "compare")
