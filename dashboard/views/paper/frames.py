"""Published tables and statements with ours, as DataFrames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from flexq_bench.results.papers.statements import StatementResult
from flexq_bench.results.papers.tables import TableResult, averages
from flexq_bench.workloads.published import Paper

_PERCENT = 100.0


def overview_frame(results: Iterable[TableResult]) -> pd.DataFrame:
    """Return one row for each table."""
    return pd.DataFrame(
        {
            "table": result.name,
            "kind": result.kind,
            "ours": result.measured,
            "printed": result.printed,
            "verdict": result.verdict,
            "measures": result.table.measures,
            "mismatches": len(result.paper.mismatches(result.table)),
            "their_hardware": result.table.hardware or "not relevant",
            "our_hardware": result.gpu,
        }
        for result in results
    )


def cells_frame(result: TableResult) -> pd.DataFrame:
    """Return one row for each number of a table, with the shares of bandwidth in percent."""
    marks = result.paper.mismatches(result.table)
    rows = []
    for cell, ours in result.cells:
        named: dict[str, Any] = {key: str(value) for key, value in cell.at.items()}
        rows.append(
            named
            | {
                "metric": " ".join(part for part in (cell.metric, cell.unit) if part),
                "printed": cell.value,
                "ours": ours.value,
                "their_share": None if ours.their_share is None else ours.their_share * _PERCENT,
                "our_share": None if ours.share is None else ours.share * _PERCENT,
                "mismatch": ", ".join(m.kind for m in marks if m.marks(cell)) or None,
                "our_name": ours.name or None,
                "of": ours.model or None,
            }
        )
    return pd.DataFrame(rows)


def common_values(frame: pd.DataFrame) -> dict[str, str]:
    """Return the columns before `printed` that have one value in all rows, and the values."""
    named = list(frame.columns[: frame.columns.get_loc("printed")])
    return {name: frame[name].iloc[0] for name in named if frame[name].nunique(dropna=False) == 1}


def averages_frame(result: TableResult) -> pd.DataFrame:
    """Return the mean ratios of a table of kernels, both ways."""
    return pd.DataFrame(
        {
            "kernel": average.subject,
            "over": average.over,
            "ratios": average.count,
            "printed_arithmetic": average.theirs[0],
            "printed_geometric": average.theirs[1],
            "ours_arithmetic": None if average.ours is None else average.ours[0],
            "ours_geometric": None if average.ours is None else average.ours[1],
        }
        for average in averages(result)
    )


def statements_frame(results: Sequence[StatementResult]) -> pd.DataFrame:
    """Return one row for each statement."""
    rows = []
    for result in results:
        stated, measured = result.statement, result.measured
        rows.append(
            {
                "paper": result.paper.key,
                "where": stated.where,
                "metric": stated.metric,
                "subject": stated.subject,
                "over": stated.baseline,
                "of": stated.of,
                "stated": " ".join(filter(None, (stated.bound, stated.text))),
                "ours": None if measured is None else measured.value,
                "kind": result.kind,
                "caveat": stated.caveat,
                "verdict": result.verdict,
                "cases": 0 if measured is None else measured.cases,
                "ends": "" if measured is None else " to ".join(f"{v:.4g}" for v in measured.ends),
                "ours_geometric": None if measured is None else measured.geometric,
                "own_tables": stated.check,
                "their_hardware": stated.hardware,
                "our_hardware": "" if measured is None else measured.where,
            }
        )
    return pd.DataFrame(rows)


def mismatches_frame(papers: Sequence[Paper]) -> pd.DataFrame:
    """Return one row for each contradiction of the papers, with the tables that it is about."""
    return pd.DataFrame(
        {
            "paper": paper.key,
            "kind": mismatch.kind,
            "where": mismatch.where,
            "about": mismatch.about,
            "tables": ", ".join(t.id for t in paper.table if mismatch in paper.mismatches(t)),
        }
        for paper in papers
        for mismatch in paper.mismatch
    )
