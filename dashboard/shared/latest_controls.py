"""Controls and notes of pages that show the newest results on one GPU."""

from __future__ import annotations

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from flexq_bench.dashboard.shared.controls import Controls
from flexq_bench.dashboard.shared.formatting import as_text
from flexq_bench.db import queries
from flexq_bench.db.engine import Database

_BOOST = "boost"


def choose_regime(place: DeltaGenerator, controls: Controls, database: Database, gpu: str) -> str:
    """Select the regime, if a GPU was timed in several; the default is boost."""
    with database.session() as session:
        regimes = queries.regimes_of(session, gpu) or (_BOOST,)
    return controls.select(place, "regime", "Regime", regimes)


def choose_sweeps(place: DeltaGenerator, controls: Controls) -> bool:
    """Select whether one-off sweeps are included; by default they are not."""
    return controls.toggle(
        place,
        "sweeps",
        "Also sweeps",
        hint="Include one-off sweeps. By default the page shows runs of suites only.",
    )


def describe_regime(frame: pd.DataFrame, regime: str) -> str:
    """Return Markdown with the regime of these results, and how many have none."""
    unnamed = int((frame["regime"] == "").sum())
    if not unnamed:
        return f"regime: {regime}"
    which = "measured" if unnamed == len(frame) else f"{unnamed} of {len(frame)} measured"
    return f"regime: {regime}, {which} by protocol 1, which has no regimes"


def show_none_accepted(gpu: str, regime: str) -> None:
    """Show why there are no results of a GPU."""
    st.info(
        f"No accepted result on {as_text(gpu)} under regime {regime} yet. A result is accepted if "
        "it is correct, was timed at a valid clock, and comes from a commit without local changes: "
        "the Results page shows the others. Sweeps are shown if “Also sweeps” is on."
    )
