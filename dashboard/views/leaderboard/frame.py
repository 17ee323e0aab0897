"""Kernels on one shape as a DataFrame, fastest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from flexq_bench.dashboard.shared.formatting import short_commit
from flexq_bench.dashboard.shared.links import history_address, page_address
from flexq_bench.db.queries import ResultRow
from flexq_bench.results.latest_rows import LatestRow
from flexq_bench.results.stored_comparison import level_ratio
from flexq_bench.results.stored_noise import StoredNoise
from flexq_bench.workloads.case import kernel_label

# level_low, level_high: 95 % interval of the level, µs. slower: time / time of the fastest.
COLUMNS = (
    *("rank", "label", "median_us", "level_low", "level_high", "slower", "apart"),
    *("pct_of_floor", "tops", "gb_s", "correct", "noisy", "history", "samples", "run"),
    *("configuration", "error", "commit", "measured", "noise"),
)


def leaderboard_frame(rows: Sequence[LatestRow[ResultRow]], noise: StoredNoise) -> pd.DataFrame:
    """Return one row per correct, timed kernel, fastest first: COLUMNS.

    rows: of one shape, M, GPU, stage, cache mode and regime. apart: "yes" if the interval of the
    ratio to the fastest excludes 1.
    """
    timed = sorted(
        (row for row in rows if row.level_us is not None and row.result.median_us),
        key=lambda row: row.result.median_us or 0.0,
    )
    cells = [_cells(i, row, timed[0], noise) for i, row in enumerate(timed, start=1)]
    return pd.DataFrame(cells, columns=list(COLUMNS))


def _cells(
    rank: int, row: LatestRow[ResultRow], fastest: LatestRow[ResultRow], noise: StoredNoise
) -> dict[str, Any]:
    r, level = row.result, row.level_us
    assert level is not None  # leaderboard_frame selects such rows
    against = level_ratio(r, fastest.result, noise) if row is not fastest else None
    return {
        "rank": rank,
        "label": kernel_label(r.kernel, r.variant),
        "median_us": r.median_us,
        "level_low": level.low,
        "level_high": level.high,
        "slower": 1.0 if against is None else against.estimate,
        "apart": "fastest" if against is None else "yes" if against.low > 1 else "no",
        "pct_of_floor": row.pct_of_floor.estimate if row.pct_of_floor else None,
        "tops": None if not (r.tops and r.median_us) else r.tops * r.median_us / level.estimate,
        "gb_s": None
        if r.n is None or r.k is None
        else r.n * r.k * r.weight_bits / 8 / level.estimate / 1e3,
        "correct": "exact" if r.exact else "yes",
        "error": r.max_rel_error,
        "configuration": ", ".join(f"{name} {value}" for name, value in r.config.items()),
        "noisy": "noisy" if r.status == "noisy" else "",
        "history": history_address(r),
        "samples": page_address("measurement", uuid=r.uuid),
        "run": page_address("results", run=r.run[:8]),
        "commit": short_commit(r.commit, r.dirty),
        "measured": r.created_at,
        "noise": row.noise,
    }
