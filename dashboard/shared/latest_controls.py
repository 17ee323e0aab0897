"""Controls of pages that show what is newest on one GPU, and what a viewer should know of it."""

from __future__ import annotations

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard.shared.controls import Controls
from dashboard.shared.formatting import as_text
from db import queries
from db.engine import Database

_BOOST = "boost"


def choose_regime(place: DeltaGenerator, controls: Controls, database: Database, gpu: str) -> str:
    """boost, or what the viewer chose where a GPU was timed under sustained load too."""
    with database.session() as session:
        regimes = queries.regimes_of(session, gpu) or (_BOOST,)
    return controls.one(place, "regime", "Regime", regimes, regimes[0])


def choose_sweeps(place: DeltaGenerator, controls: Controls) -> bool:
    """Return True if results of sweeps, measured once, count too; by default they do not."""
    return controls.switch(
        place,
        "sweeps",
        "Also sweeps",
        hint="A sweep is measured once, to know it. Without it the page shows runs of suites.",
    )


def describe_regime(frame: pd.DataFrame, regime: str) -> str:
    """Markdown: the regime of these results, and how many of them name none."""
    unnamed = int((frame["regime"] == "").sum())
    if not unnamed:
        return f"regime: {regime}"
    which = "measured" if unnamed == len(frame) else f"{unnamed} of {len(frame)} measured"
    return f"regime: {regime}, {which} by protocol 1, which names none"


def show_none_accepted(gpu: str, regime: str) -> None:
    """Say why there is nothing to show of a GPU."""
    st.info(
        f"No accepted result on {as_text(gpu)} under regime {regime} yet. A result is accepted if "
        "it is right, was timed at a sound clock, and comes from a commit without local changes: "
        "the Results page shows the others. Sweeps are shown when asked for."
    )
