"""What a browser gets to show before it is busy with the rest of a page.

A browser evaluates Plotly and draws the first chart for the better part of two seconds, on one
thread. A table sent just before has to wait for it, and what is sent just after is prepared on that
thread first. So in a viewer's first look at the app, what a page is about gets a head start. Later
looks find Plotly evaluated, and wait for nothing.
"""

from __future__ import annotations

import time

import streamlit as st

TABLES_S = 0.3  # to paint a table
FIGURE_S = 1.5  # to evaluate Plotly and draw
_GIVEN = "head-start-given"


def let_tables_be_painted() -> None:
    """Call it between a page's main table and its first chart."""
    _wait_once(TABLES_S)


def let_figure_be_painted() -> None:
    """Call it between a page's main chart and whatever stands below it."""
    _wait_once(FIGURE_S)


def _wait_once(seconds: float) -> None:
    if _GIVEN not in st.session_state:
        st.session_state[_GIVEN] = True
        time.sleep(seconds)
