"""Tables on pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from flexq_bench.dashboard.shared.spreadsheet import harmless

SHAPE_COLUMNS = {
    name: st.column_config.NumberColumn(name.upper(), format="%d") for name in ("m", "n", "k")
}
_TEXT_COLUMNS = {"why", "reason", "problem", "decided by", "note"}  # sentences: they need width
_ROW_PX = 35


def height_of(rows: int, max_px: int) -> int:
    """Return the height, pixels, of a table that shows all rows if they fit."""
    return min(_ROW_PX * (rows + 1) + 3, max_px)


def offer_csv(csv: str, name: str) -> None:
    """Show a button that downloads `flexq-bench-NAME.csv`."""
    st.download_button(
        "Download CSV",
        csv,
        f"flexq-bench-{name}.csv",
        "text/csv",
        icon=":material/download:",
    )


def draw_table(
    rows: pd.DataFrame | Sequence[Mapping[str, Any]], *, drop_empty: bool = False, **options: Any
) -> None:
    """Show a table without index and formulas (see spreadsheet.py); missing values are empty.

    drop_empty: leave out columns without a value. options: of st.dataframe.
    """
    frame = pd.DataFrame(rows)
    if drop_empty:
        frame = frame.dropna(axis="columns", how="all")
    config = dict(options.pop("column_config", {}))
    for name in _TEXT_COLUMNS & set(frame.columns) - set(config):
        config[name] = st.column_config.TextColumn(width="large")
    st.dataframe(harmless(frame), hide_index=True, placeholder="", column_config=config, **options)
