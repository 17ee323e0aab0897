"""What a browser gets to show before it is busy with charts."""

from __future__ import annotations

import time

import streamlit as st

SECONDS = 0.3
_GIVEN = "head-start-given"


def let_tables_be_painted() -> None:
    """Wait a moment before the first chart that a viewer is sent; call it between the two.

    A browser evaluates Plotly for the better part of a second and paints nothing meanwhile, so a
    table sent just before waits for it, too. It does so once in a session, and so does this.
    """
    if _GIVEN not in st.session_state:
        st.session_state[_GIVEN] = True
        time.sleep(SECONDS)
