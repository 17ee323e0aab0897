"""Named queries; each returns frozen dataclasses or plain values.

A module is imported when a name of it is used: all of them take a third of the time of a short
command.
"""
# ruff: noqa: F401
# mypy: implicit-reexport

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexq_bench.db.queries.commits import (
        CommitRow,
        ReleaseRow,
        commit_row,
        commits_between,
        recent_commits,
        releases,
    )
    from flexq_bench.db.queries.filters import Filters
    from flexq_bench.db.queries.fleet import (
        DeviceRow,
        DrainRow,
        Health,
        JobRow,
        OffsetRow,
        Progress,
        RequestRow,
        WorkerRow,
        capability_of,
        comparison_outcomes,
        comparison_states,
        device_medians,
        device_offsets,
        devices,
        drains,
        health,
        jobs_of,
        last_results,
        progress,
        quarantined_jobs,
        request_by_uuid_prefix,
        requests,
        runs_on_several_devices,
        workers,
    )
    from flexq_bench.db.queries.lines import (
        branch_names,
        branch_of,
        comes_after,
        history_notes,
        is_ancestor,
        is_orphaned,
        orphaned,
    )
    from flexq_bench.db.queries.models import (
        SYNTHETIC,
        DecodeRow,
        GateRow,
        ModelResults,
        Score,
        ScoreRow,
        ServingRow,
        checkpoint_decodes,
        decoded_models,
        decoded_schemes,
        gate_history,
        latest_decodes,
        latest_gates,
        latest_scores,
        latest_servings,
        model_results,
        model_scores,
        score_values,
        scored_models,
        scored_schemes,
        suite_gates,
    )
    from flexq_bench.db.queries.nightly import (
        ChangePointRow,
        Judgement,
        NightState,
        OutcomeRow,
        change_points_by_decision,
        change_points_by_series,
        change_points_of,
        judgements,
        night_states,
        nights_page,
        run_outcomes,
        series_identity_of,
        series_of_run,
        unfinished_nights,
        verdicts_of_commit,
    )
    from flexq_bench.db.queries.pages import Page
    from flexq_bench.db.queries.records import commit_info, run_records, stored_records
    from flexq_bench.db.queries.results import (
        BACKFILL,
        SCHEDULED,
        SWEEP,
        ResultDetail,
        ResultRow,
        asked_questions,
        case_seconds,
        gpu_names,
        latest_results,
        latest_results_elsewhere,
        latest_results_page,
        newest_result_at,
        operation_names,
        regimes_of,
        result_detail,
        results_at_commit,
        results_table,
        run_results,
        run_results_page,
        samples_of,
    )
    from flexq_bench.db.queries.runs_and_plans import (
        CountRuns,
        OwnedRun,
        RunCounts,
        RunName,
        RunSummary,
        cases_to_measure,
        first_run_sharing_cases,
        last_nights,
        latest_runs,
        leased_jobs,
        measured_commits,
        missing_cases,
        owned_runs,
        rows_stored,
        run_by_uuid_prefix,
        run_counts,
        run_info,
        run_names,
        run_options,
        run_uuid_of,
        runs,
        runs_by_uuid,
        runs_changed_since,
        runs_page,
        suite_names,
    )
    from flexq_bench.db.queries.series import (
        FilterValues,
        HistoryPoint,
        ProjectSeries,
        SeriesName,
        SeriesRow,
        TimedPoint,
        filter_values,
        first_time,
        kernel_names,
        list_series,
        main_project,
        measured_series,
        newest_histories,
        noise_sigmas,
        project_names,
        project_series,
        recent_histories,
        series_histories,
        series_history,
        series_name,
        series_names,
        series_of_other_units,
        series_page,
        stored_texts,
        timed_histories,
        trusted_bases,
    )
    from flexq_bench.db.queries.verdicts import (
        AlertEventRow,
        AlertRow,
        CanaryRow,
        ComparedRow,
        DecisionRow,
        FalseAlarmRow,
        NoiseRow,
        aa_calibration,
        alert_by_id,
        alert_decisions,
        alert_decisions_page,
        alert_events,
        alert_members,
        alerts,
        alerts_page,
        canaries,
        commits_measured_after,
        comparisons_of,
        count_alerts,
        decision_evidence,
        decisions_between,
        decisions_by_uuid,
        false_alarm_rates,
        last_measured,
        latest_comparisons,
        noise_floors,
    )
    from flexq_bench.db.records import EXTERNAL_BACKEND
else:

    def __getattr__(name: str) -> Any:
        module = _modules().get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(module), name)
        return value

    @cache
    def _modules() -> dict[str, str]:
        """Return the module of each name that is imported above."""
        tree = ast.parse(Path(__file__).read_text("utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        return {name.name: node.module for node in imports for name in node.names}
