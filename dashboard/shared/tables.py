"""Tables on pages."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from dashboard.shared.spreadsheet import harmless


def draw_table(frame: pd.DataFrame, **options: Any) -> None:
    """A table whose texts no spreadsheet runs, without an index; a cell without a value is empty.

    options: as st.dataframe takes them.
    """
    st.dataframe(harmless(frame), hide_index=True, placeholder="", **options)
