"""Tables on pages."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from flexq_bench.dashboard.shared.spreadsheet import harmless


def draw_table(frame: pd.DataFrame, **options: Any) -> None:
    """Show a table without index and formulas (see spreadsheet.py); missing values are empty.

    options: of st.dataframe.
    """
    st.dataframe(harmless(frame), hide_index=True, placeholder="", **options)
