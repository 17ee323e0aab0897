"""Streamlit script of `flexq-bench dashboard`: the navigation and layout of all pages."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import streamlit as st

from dashboard.database import current_database
from dashboard.shared.search import show_search
from dashboard.views.accuracy import page as accuracy
from dashboard.views.alert import page as alert
from dashboard.views.compare import page as compare
from dashboard.views.decode import page as decode
from dashboard.views.fleet import page as fleet
from dashboard.views.history import page as history
from dashboard.views.kernels import page as kernels
from dashboard.views.leaderboard import page as leaderboard
from dashboard.views.measurement import page as measurement
from dashboard.views.overview import page as overview
from dashboard.views.paper import page as paper
from dashboard.views.pareto import page as pareto
from dashboard.views.results import page as results
from dashboard.views.scoreboard import page as scoreboard
from dashboard.views.sweep import page as sweep
from dashboard.views.triage import page as triage
from db.errors import DatabaseError
from kernels.outside import installed

if TYPE_CHECKING:
    from kernels.contract import LinearKernel


def _described() -> Iterable[LinearKernel]:
    from flexq_bench.measure.outside_kernels import describe_installed  # brings torch

    return describe_installed()


# This process writes requests and serves everybody: code of others runs in another one.
installed.find_by(_described)
# The first one is where the app opens. All of them are in sight, as a folded one costs a click, and
# in one list: Streamlit's sections of a list are none to a screen reader.
pages = (
    *(scoreboard, leaderboard, overview, triage, alert, history, compare, measurement),
    *(kernels, results, sweep, paper, accuracy, pareto, decode, fleet),
)
# Before the navigation, which would fetch the icon of a page from the network; after it for titles.
st.set_page_config(page_title="FlexQ Bench", page_icon="⏱️", layout="wide")
shown = st.navigation([one.as_page() for one in pages], expanded=True)
st.set_page_config(page_title=f"{shown.title} · FlexQ Bench", page_icon="⏱️", layout="wide")
# Streamlit greys captions to a contrast below 4.5; here they say what a number rests on.
st.html("<style>[data-testid=stCaptionContainer] * { color: inherit; opacity: 1 }"
        "[data-testid=stCaptionContainer] { color: inherit; opacity: 1 }"
        # Tables take the width that Streamlit leaves empty on both sides.
        "[data-testid=stMainBlockContainer] { padding: 4rem clamp(1rem, 2vw, 3rem) }"
        "</style>")  # fmt: skip
with suppress(DatabaseError):  # the page says why it can't be opened
    show_search(current_database())
shown.run()
