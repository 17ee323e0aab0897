"""Age of the newest result, and reruns of the page when newer results arrive."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import streamlit as st

from flexq_bench.dashboard.shared.formatting import as_age
from flexq_bench.db import queries
from flexq_bench.db.engine import Database

_REFRESH_INTERVAL = timedelta(seconds=30)
_LAST_NEWEST = "freshness.newest"


@st.fragment(run_every=_REFRESH_INTERVAL)
def show_freshness(database: Database) -> None:
    """Show the age of the newest result, and rerun the page when a newer one arrives."""
    with database.session() as session:
        newest = queries.newest_result_at(session)
    last_newest = st.session_state.get(_LAST_NEWEST, newest)
    st.session_state[_LAST_NEWEST] = newest
    if newest is not None:
        age = as_age(datetime.now(UTC) - newest)
        st.caption(f"Newest result: {age} ago. This page updates when newer results arrive.")
    if newest != last_newest:
        st.rerun()
