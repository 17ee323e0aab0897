"""Named queries: each has the name of its question and gives back frozen values."""

from __future__ import annotations

from db.queries.filters import Filters
from db.queries.noise import (
    FalseAlarmRow,
    NoiseRow,
    false_alarm_rates,
    noise_book,
    noise_floors,
)
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
    trusted_base,
)
from db.queries.verdicts import (
    AlertEventRow,
    AlertRow,
    DecisionRow,
    alert_by_id,
    alert_decisions,
    alert_events,
    alerts,
    canaries,
    decision_evidence,
    latest_decisions_from,
)

__all__ = [
    "AlertEventRow",
    "AlertRow",
    "DecisionRow",
    "FalseAlarmRow",
    "FilterValues",
    "Filters",
    "HistoryPoint",
    "NoiseRow",
    "ResultRow",
    "RunSummary",
    "SeriesRow",
    "alert_by_id",
    "alert_decisions",
    "alert_events",
    "alerts",
    "canaries",
    "decision_evidence",
    "false_alarm_rates",
    "filter_values",
    "kernel_names",
    "latest_complete_runs",
    "latest_decisions_from",
    "list_series",
    "missing_cases",
    "noise_book",
    "noise_floors",
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
    "trusted_base",
]
