"""What `flexq-bench dashboard` hands to Streamlit: the frame that every page stands in."""

from __future__ import annotations

from contextlib import suppress

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

# The first one is where the app opens. All of them are in sight: a folded one costs a click.
pages = {
    "What changed": (scoreboard, overview, triage, alert, history, compare, measurement),
    "Kernels": (leaderboard, kernels, results, sweep, paper),
    "Models": (accuracy, pareto, decode),
    "Service": (fleet,),
}
shown = st.navigation(
    {section: [one.as_page() for one in of] for section, of in pages.items()}, expanded=True
)
st.set_page_config(page_title=f"{shown.title} · FlexQ Bench", page_icon="⏱️", layout="wide")
with suppress(DatabaseError):  # the page says why it can't be opened
    show_search(current_database())
shown.run()
