"""What `flexq-bench dashboard` hands to Streamlit: the frame that every page stands in."""

from __future__ import annotations

import streamlit as st

from dashboard.pages import results

st.set_page_config(page_title="FlexQ Bench", page_icon="⏱️", layout="wide")
pages = [
    st.Page(
        results.page,
        title="Results",
        icon=":material/table_chart:",
        url_path="results",
        default=True,
    )
]
st.navigation(pages).run()
