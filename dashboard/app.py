"""Streamlit script of `flexq-bench dashboard`: the navigation and layout of all pages."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import streamlit as st

from flexq_bench.dashboard.database import current_database
from flexq_bench.dashboard.pages import SECTIONS
from flexq_bench.dashboard.shared import static_table
from flexq_bench.dashboard.shared.project import show_place
from flexq_bench.dashboard.shared.search import show_search
from flexq_bench.dashboard.views.accuracy import page as accuracy
from flexq_bench.dashboard.views.alert import page as alert
from flexq_bench.dashboard.views.compare import page as compare
from flexq_bench.dashboard.views.decode import page as decode
from flexq_bench.dashboard.views.engines import page as engines
from flexq_bench.dashboard.views.fleet import page as fleet
from flexq_bench.dashboard.views.history import page as history
from flexq_bench.dashboard.views.home import page as home
from flexq_bench.dashboard.views.kernels import page as kernels
from flexq_bench.dashboard.views.leaderboard import page as leaderboard
from flexq_bench.dashboard.views.measurement import page as measurement
from flexq_bench.dashboard.views.paper import page as paper
from flexq_bench.dashboard.views.pareto import page as pareto
from flexq_bench.dashboard.views.results import page as results
from flexq_bench.dashboard.views.ship import page as ship
from flexq_bench.dashboard.views.sweep import page as sweep
from flexq_bench.dashboard.views.triage import page as triage
from flexq_bench.db.errors import DatabaseError
from flexq_bench.kernels.external import installed

if TYPE_CHECKING:
    from flexq_bench.kernels.contract import LinearKernel


def _installed_kernels() -> Iterable[LinearKernel]:
    from flexq_bench.measure.external_kernels import describe_installed  # imports torch

    return describe_installed()


# Kernels from outside are described in a subprocess, because this process serves all viewers
# and writes to the database.
installed.find_by(_installed_kernels)
# The first page of each section stands for it in the navigation; the others of the section are
# linked above the title of each of its pages, but for details, to which only links lead.
views = (
    *(home, triage, alert, leaderboard, kernels, history, measurement),
    *(ship, pareto, accuracy, decode, engines),
    *(results, fleet, sweep, compare, paper),
)
by_section = {name: [v.page for v in views if v.page.section == name] for name in SECTIONS}
links = {
    id(page): page.as_link(opens_section=page is pages[0])
    for pages in by_section.values()
    for page in pages
}
# Called before the navigation, which else loads a page's icon from the network, and again for
# titles.
st.set_page_config(page_title="FlexQ Bench", page_icon="⏱️", layout="wide")
shown = st.navigation(list(links.values()), expanded=True)
current = next(view.page for view in views if links[id(view.page)] == shown)
st.set_page_config(page_title=f"{current.title} · FlexQ Bench", page_icon="⏱️", layout="wide")
# Streamlit's grey captions have a contrast below 4.5; here they explain how numbers are computed.
st.html("<style>[data-testid=stCaptionContainer] * { color: inherit; opacity: 1 }"
        "[data-testid=stCaptionContainer] { color: inherit; opacity: 1 }"
        # Tables use the width of Streamlit's margins.
        "[data-testid=stMainBlockContainer] { padding: 4rem clamp(1rem, 2vw, 3rem) }"
        f"{static_table.STYLE}</style>")  # fmt: skip
with suppress(DatabaseError):  # the page shows the error
    show_place(current_database())
    show_search(current_database())
siblings = [page for page in by_section[current.section] if not page.is_detail]
if len(siblings) > 1:
    row = st.container(horizontal=True, key="section")
    for page in siblings:
        row.page_link(links[id(page)], label=page.title, icon=page.icon)
shown.run()
