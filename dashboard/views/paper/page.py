"""Paper: published tables and statements beside ours, each with a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import streamlit as st

from flexq_bench.dashboard.database import command_on
from flexq_bench.dashboard.pages import EXPLORE, app_page
from flexq_bench.dashboard.shared.controls import Controls, page_controls
from flexq_bench.dashboard.shared.formatting import as_text
from flexq_bench.dashboard.shared.spreadsheet import to_csv
from flexq_bench.dashboard.shared.tables import draw_table, offer_csv
from flexq_bench.dashboard.views.paper.frames import (
    averages_frame,
    cells_frame,
    common_values,
    mismatches_frame,
    overview_frame,
    statements_frame,
)
from flexq_bench.db.engine import Database
from flexq_bench.results.papers.evidence import Evidence, read_evidence
from flexq_bench.results.papers.statements import is_of, statement_result
from flexq_bench.results.papers.steps import named_figures
from flexq_bench.results.papers.tables import TableResult, table_result
from flexq_bench.workloads.published import (
    Figure,
    Paper,
    PublishedTable,
    Statement,
    published_papers,
    select_tables,
)

_MAX_HEIGHT_PX = 900
_ALL_TABLES_PX = 1600
_MANY_REASONS = 4
_ALL = "overview"
_SHARE = "share of the memory bandwidth at which the weights are read; above 100 %: from the cache"


@app_page("Paper", section=EXPLORE, icon=":material/menu_book:")
def page(database: Database) -> None:
    """Show an overview of all published tables, or one of them."""
    with database.session() as session:
        evidence = read_evidence(session)
    with page_controls("paper", "Not published, so ignored") as controls:
        figures = {f"{p.key}/{f.id}": (p, f) for p, f in named_figures(published_papers())}
        names = [f"{paper.key}/{table.id}" for paper, table in select_tables(None)]
        chosen = controls.select(
            st.sidebar, "table", "Table or figure", [_ALL, *sorted([*names, *figures])]
        )
        if chosen == _ALL:
            _show_overview(controls, database, evidence)
        elif chosen in figures:
            _show_figure(database, evidence, *figures[chosen])
        else:
            _show_table(controls, database, evidence, chosen)


def _show_overview(controls: Controls, database: Database, evidence: Evidence) -> None:
    paper = controls.multiselect(
        st.sidebar, "paper", "Paper", [paper.key for paper in published_papers()]
    )
    chosen = [one for one in published_papers() if not paper or one.key in paper]
    results = [table_result(one, table, evidence) for one in chosen for table in one.table]
    counts = Counter(result.kind for result in results)
    st.caption(
        f"{len(results)} tables of {len(chosen)} papers: "
        + ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        + ". Numbers of papers were not measured here. GPUs and models differ, so orders and "
        "ratios within a table are compared. Select a table for its numbers."
    )
    if not any(result.measured for result in results):
        st.info(f"Nothing of this is measured here yet: {command_on(database, 'reproduce')}")
    frame = overview_frame(results)
    draw_table(
        frame,
        wrap=False,
        max_px=_ALL_TABLES_PX,
        column_config={
            "ours": st.column_config.NumberColumn("with ours"),
            "printed": st.column_config.NumberColumn("of numbers"),
            "mismatches": st.column_config.NumberColumn(
                "mismatches", help="contradictions within the paper, or with other sources"
            ),
            "their_hardware": "their hardware",
            "our_hardware": "our hardware",
        },
        key="paper-overview",
    )
    offer_csv(to_csv(frame), "papers")
    st.header("Statements", anchor=False)
    st.caption(
        "Numbers of the running text. Ours: the best case if they state one, else the arithmetic "
        "mean, with the geometric mean beside it. Accuracy is of a small model at hand unless the "
        "named one was evaluated: its sign is judged, not its size."
    )
    _show_statements(evidence, [(one, each) for one in chosen for each in one.statement])
    st.header("Mismatches", anchor=False)
    st.caption(
        "Contradictions found by recomputing: mean, a printed mean is not that of its columns; "
        "text, two places differ; misprint, an implausible cell; elsewhere, another paper or the "
        "hardware says otherwise."
    )
    draw_table(mismatches_frame(chosen), max_px=_MAX_HEIGHT_PX, key="paper-mismatches")


def _show_statements(evidence: Evidence, given: Sequence[tuple[Paper, Statement]]) -> None:
    stated = statements_frame([statement_result(*each, evidence) for each in given]).sort_values(
        "ours", na_position="last", key=lambda v: v.isna(), kind="stable"
    )
    draw_table(
        stated,
        wrap=False,
        max_px=_MAX_HEIGHT_PX,
        column_config={
            "ours": st.column_config.NumberColumn("ours", format="%.4g"),
            "ends": st.column_config.TextColumn("from to", help="the least and the largest case"),
        },
        key="paper-statements",
    )
    offer_csv(to_csv(stated), "statements")


def _show_figure(database: Database, evidence: Evidence, paper: Paper, figure: Figure) -> None:
    st.header(as_text(f"{paper.paper.source}, {figure.id}: {figure.shows}"), anchor=False)
    st.caption(
        as_text(f"Its bars are not known, so ours are compared with the text: {figure.stated}.")
    )
    st.caption(f"To measure it: {command_on(database, 'reproduce', f'{paper.key}/{figure.id}')}")
    _show_stated(evidence, paper, figure)


def _show_stated(evidence: Evidence, paper: Paper, entry: PublishedTable | Figure) -> None:
    """Show what the text states about a table or figure."""
    about = [(paper, each) for each in paper.statement if is_of(each, entry)]
    if about:
        st.subheader("Stated about it", anchor=False)
        _show_statements(evidence, about)


def _show_table(controls: Controls, database: Database, evidence: Evidence, name: str) -> None:
    ((paper, table),) = select_tables(name)
    gpu = controls.select(st.sidebar, "gpu", "Our GPU", ["", *evidence.gpus], format_func=_named)
    result = table_result(paper, table, evidence, gpu or None)
    st.header(as_text(f"{paper.paper.source}, {table.id}: {table.measures}"), anchor=False)
    _show_verdict(result)
    if result.kind == "not here":
        st.caption(f"To measure it: {command_on(database, 'reproduce', name)}")
    for caveat in table.caveats:
        st.warning(as_text(caveat), icon=":material/warning:")
    for mismatch in paper.mismatches(table):
        st.warning(
            as_text(f"Mismatch ({mismatch.kind}), {mismatch.where}: {mismatch.about}"),
            icon=":material/report:",
        )
    frame = cells_frame(result)
    common = common_values(frame)
    if common:
        st.caption(as_text("All of " + ", ".join(f"{k} {v}" for k, v in common.items())))
    share = st.column_config.NumberColumn
    draw_table(
        frame.drop(columns=list(common)),
        drop_empty=True,
        max_px=_MAX_HEIGHT_PX,
        column_config={
            "printed": st.column_config.NumberColumn("printed", format="%.6g"),
            "ours": st.column_config.NumberColumn("ours", format="%.6g"),
            "our_name": "our kernel or scheme",
            "of": "on the model",
            "mismatch": st.column_config.TextColumn("mismatch", help="described above"),
            "their_share": share("their bandwidth %", format="%.0f", help=_SHARE),
            "our_share": share("our bandwidth %", format="%.0f", help=_SHARE),
        },
        key="paper-table",
    )
    offer_csv(to_csv(frame), name.replace("/", "-"))
    reasons = Counter(o.reason for c, o in result.cells if o.value is None and c.value is not None)
    for reason, count in reasons.most_common(_MANY_REASONS):
        st.caption(as_text(f"{count} without ours: {reason}"))
    _show_stated(evidence, paper, table)
    means = averages_frame(result)
    if not means.empty:
        st.caption("Mean speed-ups over all shapes of the table, arithmetic and geometric.")
        draw_table(means, key="paper-averages")
    with st.expander("Setting and notes of the paper"):
        setting = [f"{key}: {value}" for key, value in table.setting.items()]
        repaired = [f"read from damaged text: {place}" for place in table.repaired]
        inferred = [f"named by its position: {column}" for column in table.columns_inferred]
        weighted = ["its means weight the columns"] if table.weighted_mean else []
        for line in (*setting, *table.notes, *repaired, *inferred, *weighted):
            st.caption(as_text(str(line)))


def _show_verdict(result: TableResult) -> None:
    hardware = f"theirs: {result.table.hardware or 'not relevant'}; ours: {result.gpu or 'none'}"
    text = as_text(f"{result.verdict}. Hardware: {hardware}.")
    boxes = {"reproduced": st.success, "differs": st.warning}
    boxes.get(result.kind, st.info)(text)


def _named(gpu: str) -> str:
    return gpu or "the one with most numbers"
