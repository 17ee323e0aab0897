"""Paper: published numbers next to measured ones, kept apart."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from flexq_bench.dashboard.database import command_on
from flexq_bench.dashboard.pages import EXPLORE, app_page
from flexq_bench.dashboard.shared.charts import draw_chart
from flexq_bench.dashboard.shared.controls import Controls, page_controls
from flexq_bench.dashboard.shared.formatting import as_code, as_text
from flexq_bench.dashboard.shared.spreadsheet import to_csv
from flexq_bench.dashboard.shared.tables import draw_table, height_of, offer_csv
from flexq_bench.dashboard.views.paper.charts import ratio_chart
from flexq_bench.dashboard.views.paper.frame import paper_frame
from flexq_bench.dashboard.views.paper.measured import SUCCESSORS, measured_values
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.queries import SWEEP, Filters
from flexq_bench.db.reference_store import ReferenceInfo
from flexq_bench.results.stored_noise import read_noise
from flexq_bench.workloads.case import parse_kernel_label
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.published import absent_tables

_MAX_HEIGHT_PX = 900


@app_page("Paper", section=EXPLORE, icon=":material/menu_book:")
def page(database: Database) -> None:
    """Show published and measured numbers of the selected papers."""
    with database.session() as session:
        stated = queries.reference_values(session)
    if stated:
        with page_controls("paper", "Not published, so ignored") as controls:
            drawn = _show(controls, database, stated)
        if drawn is not None:
            _show_table(drawn)
    else:
        st.info(
            f"No published number is stored in {as_code(database.url)}. They come with the "
            f"program: {command_on(database, 'db', 'upgrade')}. Then reload this page.",
            icon=":material/menu_book:",
        )
    _show_absent()


def _show(
    controls: Controls, database: Database, stated: Sequence[ReferenceInfo]
) -> pd.DataFrame | None:
    """Show the controls and the chart; return the matching rows, None: there are none."""
    paper = controls.multiselect(st.sidebar, "paper", "Paper", sorted({v.source for v in stated}))
    metric = controls.multiselect(st.sidebar, "metric", "What", sorted({v.metric for v in stated}))
    measured_only = controls.toggle(
        st.sidebar, "measured", "Only what is measured here",
        hint="Hide published numbers for which this database has no result.",
    )  # fmt: skip
    selected = [
        value
        for value in stated
        if (not paper or value.source in paper) and (not metric or value.metric in metric)
    ]
    frame = _frame(database, selected)
    if measured_only:
        frame = frame[frame["ours"].notna()]
    frame = frame.sort_values("ours", na_position="last", key=lambda v: v.isna(), kind="stable")
    if frame.empty:
        st.info("Nothing passes all filters: remove one, or clear them all.")
        return None
    st.caption(
        "Published numbers are the papers': none of them was measured here, and they have no "
        "interval. Ours are the newest accepted results, with 95 % intervals: for a published "
        "mean the geometric mean over the layers on which both kernels were timed, weights cold, "
        "GEMM only, regime boost; for a best case our best case. The GPUs differ, so only ratios "
        "are comparable, not times."
    )
    if frame["ours"].isna().all():
        measure = command_on(database, "run", "paper-fig10")
        st.info(f"Nothing of this is measured here yet. Kernels: {measure}")
    if (frame["unit"] == "×").any():
        draw_chart(ratio_chart(frame), key="paper")
    return frame


def _frame(database: Database, stated: Sequence[ReferenceInfo]) -> pd.DataFrame:
    speedups = [value for value in stated if value.metric == "speedup"]
    labels = {
        label
        for value in speedups
        for label in (value.kernel, value.baseline, *SUCCESSORS.get(value.kernel, ()))
    }
    names = tuple(sorted({parse_kernel_label(label)[0] for label in labels}))
    models = sorted({value.model for value in stated if value.metric == "perplexity"})
    with database.session() as session:
        filters = Filters(kernels=names, without_triggers=(SWEEP,), projects=("",))
        results = queries.latest_results(session, filters) if names else []
        runs = tuple(sorted({r.run for r in results}))
        in_runs = Filters(runs=runs, kernels=names)
        baselines = queries.results_table(session, in_runs) if runs else []
        noise = read_noise(session, {r.series_id for r in results})
        scores = queries.latest_scores(session, models)
        decodes = queries.latest_decodes(session)
    return paper_frame(
        [
            (
                value,
                measured_values(value, results, scores, decodes, baselines=baselines, noise=noise),
            )
            for value in stated
        ]
    )


def _show_table(frame: pd.DataFrame) -> None:
    number = st.column_config.NumberColumn
    draw_table(
        frame.assign(of=frame["of"].where(frame["of"] > 0)),
        height=height_of(len(frame), _MAX_HEIGHT_PX),
        column_config={
            "source": "paper",
            "table": "where in it",
            "metric": "what",
            "kernel": st.column_config.TextColumn("kernel or scheme"),
            "baseline": st.column_config.TextColumn("over", width="medium"),
            "m": "M",
            "bound": st.column_config.TextColumn("is", help="empty: a mean or a single value"),
            "published": number("published", format="%.4g", help="not measured here"),
            "hardware": "their hardware",
            "ours": number("ours", format="%.4g", help="empty: see caveats"),
            "our_kernel": "our kernel",
            "of": number("of", help="number of layers of the published number; empty: unknown"),
            "ours_low": number("low", format="%.4g"),
            "ours_high": number("high", format="%.4g"),
            "gpu": "our GPU",
            "cases": number("cases", help="number of cases of our number"),
            "caveats": st.column_config.TextColumn("caveats", width="large"),
            "apart": number("apart", help="cases whose two times are of separate runs"),
        },
        key="paper-table",
    )
    offer_csv(to_csv(frame), "papers")


def _show_absent() -> None:
    st.header("Unavailable tables", anchor=False)
    st.caption("Published tables whose numbers are not available.")
    try:
        rows = [
            {"paper": table.source, "table": table.table, "about": table.about, "why": table.why}
            for table in absent_tables()
        ]
    except WorkloadError as error:
        st.error(as_text(str(error)))
        return
    draw_table(rows, key="absent")
