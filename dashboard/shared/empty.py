"""What every page says of a database that holds no results."""

from __future__ import annotations

import streamlit as st

from dashboard.shared.formatting import as_code
from db.engine import Database
from flexq_bench.runs import command_lines as invocation


def say_that_it_is_empty(database: Database) -> None:
    """How to fill it."""
    measure = invocation.command("run", "smoke", *invocation.database_arguments(database))
    load = invocation.command("db", "import", "FILE", *invocation.database_arguments(database))
    st.info(
        f"No results in {as_code(database.url)} yet. Measure something: {as_code(measure)}, or "
        f"load records that another machine wrote: {as_code(load)}. Then reload this page.",
        icon=":material/science:",
    )
