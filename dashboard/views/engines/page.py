"""Engines: accuracy against speed of served engines and checkpoints, as gates judged them."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from flexq_bench.dashboard.database import command_on
from flexq_bench.dashboard.pages import ACCURACY, app_page
from flexq_bench.dashboard.shared.charts import draw_chart
from flexq_bench.dashboard.shared.colors import scheme_styles
from flexq_bench.dashboard.shared.controls import Controls
from flexq_bench.dashboard.shared.formatting import as_code, as_text, time_zone
from flexq_bench.dashboard.shared.gates import cause_lines, show_limits
from flexq_bench.dashboard.shared.tables import draw_table
from flexq_bench.dashboard.views.engines import charts
from flexq_bench.dashboard.views.engines.frame import (
    accuracy_checks,
    engines_frame,
    speed_checks,
)
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.queries import GateRow

_SUITE = "served"  # of the runs of `gate served`
_MAX_GATES = 500
_CHANGES, _VALUES = "changes", "values"


@app_page("Engines", section=ACCURACY, icon=":material/dns:")
def page(database: Database) -> None:
    """Show each engine that was compared with the selected base, and the limits of each gate."""
    with database.session() as session:
        gates = queries.suite_gates(session, _SUITE, limit=_MAX_GATES)
    if not gates:
        gate = command_on(database, "gate", "served", "--base", "CMD|URL", "--head", "CMD|URL")
        st.info(f"No engine was compared yet. Compare two: {gate}", icon=":material/dns:")
        return
    controls = Controls("engines")
    bases = list(dict.fromkeys(gate.base for gate in gates))
    base = controls.select(st.sidebar, "base", "Base", bases, always_in_url=True)
    gates = [gate for gate in gates if gate.base == base]
    accuracy = _check(controls, "accuracy", "Accuracy", accuracy_checks(gates))
    speed = _check(controls, "speed", "Speed", speed_checks(gates))
    axes = controls.select(st.sidebar, "axes", "Axes", (_CHANGES, _VALUES), radio=True)
    _show_engines(engines_frame(gates, accuracy, speed), base, accuracy, speed, axes)
    _show_gates(controls, gates)
    for missing in controls.ignored:
        st.warning(f"Not stored, so ignored: {as_text(missing)}.")


def _check(controls: Controls, name: str, label: str, checks: Sequence[str]) -> str:
    return controls.select(st.sidebar, name, label, checks) if checks else ""


def _show_engines(frame: pd.DataFrame, base: str, accuracy: str, speed: str, axes: str) -> None:
    st.caption(
        f"Against {as_code(base)}: {as_text(accuracy or 'no accuracy was judged')}; "
        f"{as_text(speed or 'no speed was judged')}. The newest gate of each engine."
    )
    if frame.dropna(subset=["accuracy change", "speed change"]).empty:
        st.caption(
            "Nothing to draw: this needs a gate that judged both accuracy and speed. The table "
            "has what is known."
        )
    else:
        metric = speed.partition(": ")[2] or speed
        styles = scheme_styles(frame["engine"])
        is_change = axes == _CHANGES
        draw = charts.accuracy_over_speed if is_change else charts.accuracy_and_speed
        draw_chart(draw(frame, styles, metric, base), key="engines")
        st.caption(
            "Bars are 95 % intervals of paired differences; the base is "
            f"{'where the lines cross' if is_change else 'a star for each gate'}. "
            "Higher is better; latencies are better to the left, rates to the right."
        )
    number = st.column_config.NumberColumn
    points, percent = number(format="%+.2f"), number(format="%+.2f")
    draw_table(
        frame.drop(columns="outcome"),
        column_config={
            "accuracy of base": number(format="%.2f"),
            "accuracy": number(format="%.2f"),
            "accuracy change": points,
            "accuracy low": points,
            "accuracy high": points,
            "speed of base": number(format="%.4g"),
            "speed": number(format="%.4g"),
            "speed change": percent,
            "speed low": percent,
            "speed high": percent,
            "limits": st.column_config.LinkColumn(display_text="show"),
        },
        key="compared",
    )


def _show_gates(controls: Controls, gates: Sequence[GateRow]) -> None:
    st.header("Gates", anchor="gates")
    chosen = show_limits(controls, gates, {}, time_zone(st.context.timezone))
    for line in cause_lines(chosen):
        st.caption(as_code(line))
