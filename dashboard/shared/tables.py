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
_LINE = 50  # characters of a line in a wide column; longer texts are wrapped
_MAX_LINES = 6  # of a row
_ROW_PX, _LINE_PX = 35, 20


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
    rows: pd.DataFrame | Sequence[Mapping[str, Any]],
    *,
    drop_empty: bool = False,
    wrap: bool = True,
    max_px: int | None = None,
    **options: Any,
) -> None:
    """Show a table without index and formulas (see spreadsheet.py); missing values are empty.

    drop_empty: leave out columns without a value. wrap: wrap sentences, instead of cutting them.
    max_px: show all rows if they fit into this height, pixels; None: Streamlit's height. options:
    of st.dataframe.
    """
    frame = pd.DataFrame(rows)
    if drop_empty:
        frame = frame.dropna(axis="columns", how="all")
    config = dict(options.pop("column_config", {}))
    lines = 1
    for name in frame.select_dtypes(["object", "string"]).columns:
        longest = max(map(len, filter(is_sentence, frame[name])), default=0)
        if longest:
            config.setdefault(name, st.column_config.TextColumn(width="large"))
            lines = max(lines, min(-(-longest // _LINE), _MAX_LINES)) if wrap else 1
    row_px = _ROW_PX + _LINE_PX * (lines - 1)
    if lines > 1:  # texts are wrapped if rows are higher than usual
        options["row_height"] = row_px
    if max_px is not None:
        options["height"] = min(row_px * len(frame) + _ROW_PX + 3, max_px)
    st.dataframe(harmless(frame), hide_index=True, placeholder="", column_config=config, **options)


def is_sentence(value: object) -> bool:
    """Return True for a text that is wrapped instead of cut."""
    return isinstance(value, str) and len(value) > _LINE and " " in value
