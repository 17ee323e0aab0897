"""Results: times of kernels by layer, relative to a baseline and the floor."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from flexq_bench.dashboard.database import show_empty_database
from flexq_bench.dashboard.pages import RUNS, app_page
from flexq_bench.dashboard.shared.charts import draw_chart
from flexq_bench.dashboard.shared.colors import Style, kernel_styles
from flexq_bench.dashboard.shared.controls import Controls, page_controls
from flexq_bench.dashboard.shared.formatting import as_code, as_text, stage_in_words, time_zone
from flexq_bench.dashboard.shared.results_frame import as_csv, results_frame
from flexq_bench.dashboard.shared.results_table import show_table
from flexq_bench.dashboard.shared.runs import (
    advise,
    choose_runs,
    describe_runs,
    list_runs,
)
from flexq_bench.dashboard.shared.tables import offer_csv
from flexq_bench.dashboard.views.results import charts
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.queries import ResultRow, RunName
from flexq_bench.db.records import LINEAR
from flexq_bench.runs import command_lines
from flexq_bench.stats.baseline import BASELINE
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.probes import is_probe

_FILTERS = {  # column (also its name in the URL) -> label
    "gpu": "GPU",
    "backend": "Backend",
    "kernel": "Kernel",
    "variant": "Variant",
    "model": "Model",
    "layer": "Layer",
    "operation": "Operation",
    "m": "M (tokens)",
    "stage": "Stage",
    "cache": "Cache",
    "status": "Status",
}
_INTERVALS = (
    "Bars are 95 % intervals. A ratio's interval comes from those of its two times, taken as "
    "independent: on a log scale the distances to their ends add in quadrature."
)


@app_page("Results", section=RUNS, icon=":material/table_chart:")
def page(database: Database) -> None:
    """Show the results of the selected runs."""
    listed = list_runs(database)
    if not listed:
        show_empty_database(database)
        return
    with page_controls("results", "Not among these results, so ignored") as controls:
        _show_runs(controls, database, listed)


def _show_runs(controls: Controls, database: Database, listed: list[RunName]) -> None:
    zone = time_zone(st.context.timezone)
    shown = choose_runs(st.sidebar, controls, database, listed, zone)
    if shown.runs:
        st.caption(describe_runs(shown, zone))
    for line in advise(shown, listed, database):
        st.warning(line, icon=":material/hourglass_disabled:")
    results = shown.results(database)
    if not results:
        if shown.runs:
            st.info("These runs have no result yet: reload, or choose other runs.")
        else:
            st.info("No run is complete yet: choose one under Runs to see what it has so far.")
        return
    baseline = _choose_baseline(controls, results)
    frame = results_frame(results, baseline)
    filtered = _narrow(controls, frame)
    if filtered.empty:
        st.info("No result passes all filters: remove one, or clear them all.")
        return
    _show_problems(filtered)
    with database.session() as session:
        kernels = queries.kernel_names(session)
    used = zip(frame["kernel"], frame["variant"], strict=True)
    show_table(filtered, baseline, zone)
    offer_csv(as_csv(filtered), "results")
    _show_charts(controls, filtered, baseline, kernel_styles(kernels, used))


def _choose_baseline(controls: Controls, results: list[ResultRow]) -> str:
    labels = sorted({kernel_label(r.kernel, r.variant) for r in results if not is_probe(r.kernel)})
    default = BASELINE if BASELINE in labels else next(iter(labels), BASELINE)
    return controls.select(st.sidebar, "baseline", "Baseline", labels, default)


def _narrow(controls: Controls, frame: pd.DataFrame) -> pd.DataFrame:
    probes = frame["is_probe"].any() and controls.toggle(
        st.sidebar,
        "probes",
        "Floors and the empty kernel",
        hint="Also list probes: reading the weights only, and launching an empty kernel.",
    )
    listed = frame if probes else frame[~frame["is_probe"]]
    return controls.narrow(listed, _FILTERS)


def _show_charts(
    controls: Controls, frame: pd.DataFrame, baseline: str, styles: dict[str, Style]
) -> None:
    timed = frame[frame["is_timed"] & (frame["operation"] == LINEAR)]
    if not frame.empty and (frame["operation"] != LINEAR).all():
        st.caption("Operations other than linear layers have charts under Kernels.")
        return
    if timed.empty:
        st.info("Nothing to draw: no result here is both correct and timed. See the table.")
        return
    row = st.container(horizontal=True, gap="large")
    groups = list(dict.fromkeys(zip(timed["gpu"], timed["run"], strict=True)))
    gpu, run = controls.select(
        row,
        "chart",
        "Charts of",
        groups,
        format_func=lambda group: f"{group[0]} · run {group[1][:8]}",
        to_url=lambda group: f"{group[1][:8]} {group[0]}",
    )
    part = timed[(timed["gpu"] == gpu) & (timed["run"] == run)]
    paths = sorted(set(zip(part["stage"], part["cache"], strict=True)))
    stage, cache = controls.select(
        row,
        "chart-stage",
        "Stage",
        paths,
        format_func=lambda path: f"{stage_in_words(path[0])}, {path[1]}",
        to_url=" ".join,
        radio=True,
    )
    part = part[(part["stage"] == stage) & (part["cache"] == cache)]
    tokens = sorted(part["m"].unique().tolist())
    m = controls.select(row, "chart-m", "M (tokens)", tokens, radio=True)
    part = part[part["m"] == m]

    st.header(f"Speed-up over {as_text(baseline)}", anchor=False)
    st.caption(f"{as_text(gpu)} · {as_text(f'{stage} · {cache}')} · M = {m}. {_INTERVALS}")
    if (part["speedup"].notna() & (part["label"] != baseline)).any():
        draw_chart(charts.speedup_by_layer(part, baseline, styles), key="speedup")
    elif (part["label"] == baseline).all():
        st.info(
            f"Only {as_text(baseline)} is here: choose another baseline, or measure other kernels "
            f"in the same run, for example {as_code(command_lines.command('run', 'smoke'))}"
        )
    else:
        st.info(
            f"{as_text(baseline)} has no correct result on these layers at M = {m} in this run: "
            "choose another baseline."
        )
    st.header("Share of the floor", anchor=False)
    st.caption(
        "The floor is the time of reading the packed weights only, measured in the same run with "
        "serialized launches. A kernel that prefetches weights while the previous launch still "
        "runs can exceed 100 %."
    )
    if part["pct_of_floor"].notna().any():
        draw_chart(charts.floor_by_layer(part, styles), key="floor")
    else:
        st.info("The floor was not measured in this run, so there is nothing to compare with.")


def _show_problems(frame: pd.DataFrame) -> None:
    incorrect = int((frame["status"] == "incorrect").sum())
    if incorrect:
        st.error(
            f"{incorrect} of {len(frame)} results "
            f"{'is' if incorrect == 1 else 'are'} incorrect: flagged in the table, left out of the "
            "charts and never compared.",
            icon=":material/error:",
        )
