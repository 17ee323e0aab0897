"""What `flexq-bench dashboard` hands to Streamlit: the frame that every page stands in."""

from __future__ import annotations

import streamlit as st

from dashboard.views import (
    accuracy,
    alert,
    compare,
    decode,
    fleet,
    history,
    kernels,
    measurement,
    overview,
    paper,
    results,
    sweep,
)

st.set_page_config(page_title="FlexQ Bench", page_icon="⏱️", layout="wide")
# The first one is where the app opens.
pages = (
    *(overview, alert, history, measurement, compare),
    *(kernels, sweep, paper, results, accuracy, decode, fleet),
)
st.navigation([one.as_page() for one in pages]).run()
