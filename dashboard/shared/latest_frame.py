"""The newest results on one GPU as a DataFrame, each with the interval of its level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from flexq_bench.dashboard.shared.noise import stored_noise
from flexq_bench.dashboard.shared.project import current_project
from flexq_bench.dashboard.shared.results_frame import COLUMNS, result_cells, typed
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.queries import SWEEP, Filters, ResultRow
from flexq_bench.db.records import LINEAR
from flexq_bench.results.latest_rows import LatestRow, latest_rows
from flexq_bench.results.stored_noise import StoredNoise
from flexq_bench.stats.baseline import BASELINE
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.probes import floor_kernel, is_probe

# Columns besides results_frame.COLUMNS, whose ci_low_us and ci_high_us are of the level here.
# one_run: the baseline was measured in the same run. noise: source of the run-to-run noise. uuid:
# of the measurement. noisy: its own interval did not converge.
ADDED = {
    "one_run": "bool",
    "noise": "str",
    "noisy": "bool",
    "uuid": "str",
    "series_id": "int64",
    "base_run": "str",
}


@dataclass(frozen=True, slots=True)
class Latest:
    """Newest results on one GPU under one regime, and the stored noise of their series."""

    results: tuple[ResultRow, ...]
    noise: StoredNoise

    @property
    def labels(self) -> list[str]:
        """Kernels with their variants, sorted."""
        return sorted({kernel_label(r.kernel, r.variant) for r in self.results})

    @property
    def default_baseline(self) -> str:
        """The usual baseline, or the first kernel if the usual one was not measured."""
        return BASELINE if BASELINE in self.labels else next(iter(self.labels), BASELINE)


def read_latest(
    database: Database, gpu: str, *, regime: str, sweeps: bool, operation: str = LINEAR
) -> Latest:
    """Return the newest accepted result of every series of a GPU, without probes, of one project.

    regime: boost or sustained. sweeps: include one-off sweeps. operation: a name.
    """
    with database.session() as session:
        filters = Filters(
            gpus=(gpu,),
            operations=(operation,),
            without_triggers=() if sweeps else (SWEEP,),
            projects=(current_project(session),),
        )
        stored = queries.latest_results(session, filters, regime=regime)
        results = tuple(r for r in stored if not is_probe(r.kernel))
    noise = stored_noise(database, [r.series_id for r in results])
    return Latest(results, noise)


def read_rows(database: Database, latest: Latest, baseline: str) -> list[LatestRow[ResultRow]]:
    """Return the level and ratios of each kernel and shape. baseline: a kernel's label."""
    runs = tuple(sorted({r.run for r in latest.results}))
    kernels = {r.kernel for r in latest.results if kernel_label(r.kernel, r.variant) == baseline}
    widths = {floor_kernel(r.weight_bits) for r in latest.results}
    with database.session() as session:
        baselines = (
            queries.results_table(session, Filters(runs=runs, kernels=(*kernels, *widths)))
            if runs
            else []
        )
    return latest_rows(latest.results, baselines, baseline, latest.noise)


def latest_frame(database: Database, latest: Latest, baseline: str) -> pd.DataFrame:
    """Return one row per kernel and shape: COLUMNS and ADDED. baseline: a kernel's label."""
    return frame_of(read_rows(database, latest, baseline), baseline)


def frame_of(rows: Sequence[LatestRow[ResultRow]], baseline: str) -> pd.DataFrame:
    """Convert rows to a DataFrame, in their order."""
    types = COLUMNS | ADDED
    return typed(pd.DataFrame([_cells(row, baseline) for row in rows], columns=list(types)), types)


def _cells(row: LatestRow[ResultRow], baseline: str) -> dict[str, Any]:
    result, level = row.result, row.level_us
    return {
        **result_cells(result, row.pct_of_floor, row.speedup, baseline),
        "ci_low_us": None if level is None else level.low,
        "ci_high_us": None if level is None else level.high,
        "one_run": row.in_one_run,
        "noise": row.noise,
        "noisy": result.status == "noisy",
        "uuid": result.uuid,
        "series_id": result.series_id,
        "base_run": "" if row.base is None else row.base.run,
    }
