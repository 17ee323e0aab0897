"""Named queries: each has the name of its question and gives back frozen values."""

from __future__ import annotations

from db.queries.filters import Filters
from db.queries.records import run_records
from db.queries.results import ResultRow, results_table, run_results, samples_of
from db.queries.runs import (
    RunSummary,
    latest_complete_runs,
    missing_cases,
    run_by_idempotency_key,
    run_by_uuid_prefix,
    run_cases_received,
    run_info,
    runs,
)
from db.queries.series import (
    FilterValues,
    HistoryPoint,
    SeriesRow,
    filter_values,
    kernel_names,
    list_series,
    series_history,
)

__all__ = [
    "FilterValues",
    "Filters",
    "HistoryPoint",
    "ResultRow",
    "RunSummary",
    "SeriesRow",
    "filter_values",
    "kernel_names",
    "latest_complete_runs",
    "list_series",
    "missing_cases",
    "results_table",
    "run_by_idempotency_key",
    "run_by_uuid_prefix",
    "run_cases_received",
    "run_info",
    "run_records",
    "run_results",
    "runs",
    "samples_of",
    "series_history",
]
