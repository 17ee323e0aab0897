"""Table rows of the latest runs, and of cases without a valid result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import tzinfo
from typing import Any

from flexq_bench.dashboard.shared.formatting import local_time, short_commit
from flexq_bench.dashboard.shared.links import page_address
from flexq_bench.db.queries import OutcomeRow, RunSummary
from flexq_bench.db.records import STATUSES

_TIMED = ("ok", "noisy")
_NO_GPU = "(no result yet)"


def run_rows(
    by_gpu: Mapping[str, RunSummary],
    runs: Sequence[RunSummary],
    outcomes: Sequence[OutcomeRow],
    zone: tzinfo,
) -> list[dict[str, Any]]:
    """Return one row per GPU with the cases of its run by status, then runs without a GPU.

    by_gpu: the run to show for each GPU. runs: these, and others without a result.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    for outcome in outcomes:
        counts[outcome.run, outcome.gpu, outcome.status] += outcome.cases
    waiting = [(_NO_GPU, run) for run in runs if not run.gpus]
    rows = []
    for gpu, run in (*by_gpu.items(), *waiting):
        statuses = {status: counts[run.uuid, gpu, status] for status in STATUSES}
        rows.append(
            {
                "GPU": gpu,
                "covered": _covered(run, statuses),
                "planned": run.planned,
                "received": sum(statuses.values()),
                "missing": run.missing,
                **statuses,
                "run is": run.status,
                "suite": run.suite,
                "run": page_address("results", run=run.uuid[:8]),
                "commit": short_commit(run.commit, run.dirty),
                "started": local_time(run.created_at, zone),
            }
        )
    return rows


def _covered(run: RunSummary, statuses: Mapping[str, int]) -> float | None:
    """Return the share of planned cases with a valid result, percent; None: nothing is planned."""
    planned = max(run.planned, run.received)
    return 100 * sum(statuses[status] for status in _TIMED) / planned if planned else None


def problem_rows(
    runs: Sequence[RunSummary],
    outcomes: Sequence[OutcomeRow],
    missing: Mapping[str, Sequence[str]],
) -> list[dict[str, Any]]:
    """Return one row per reason why cases have no valid time, most cases first.

    missing: run -> keys of the planned cases without a result.
    """
    rows = [
        {
            "GPU": outcome.gpu,
            "status": outcome.status,
            "cases": outcome.cases,
            "why": outcome.detail,
            "for example": outcome.example,
            "run": outcome.run[:8],
        }
        for outcome in outcomes
        if outcome.status not in _TIMED
    ]
    rows += [
        {
            "GPU": ", ".join(run.gpus) or _NO_GPU,
            "status": "no result",
            "cases": len(missing[run.uuid]),
            "why": f"the run is {run.status}",
            "for example": missing[run.uuid][0],
            "run": run.uuid[:8],
        }
        for run in runs
        if missing.get(run.uuid)
    ]
    return sorted(rows, key=lambda row: -int(row["cases"]))
