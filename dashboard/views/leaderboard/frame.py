"""Kernels on one shape as a DataFrame, fastest first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from flexq_bench.accuracy.results import FULL_PRECISION, PERPLEXITY
from flexq_bench.dashboard.shared.formatting import short_commit
from flexq_bench.dashboard.shared.links import history_address, page_address
from flexq_bench.db.queries import ResultRow, ScoreRow
from flexq_bench.results.latest_rows import LatestRow
from flexq_bench.results.stored_comparison import level_ratio
from flexq_bench.results.stored_noise import StoredNoise
from flexq_bench.workloads.case import bits_label, kernel_label

# level_low, level_high: 95 % interval of the level, µs. slower: time / time of the fastest.
COLUMNS = (
    *(
        "rank",
        "label",
        "format",
        "class",
        "in_class",
        "median_us",
        "level_low",
        "level_high",
        "slower",
        "apart",
    ),
    *("pct_of_floor", "tops", "gb_s", "correct", "noisy", "history", "samples", "run"),
    *("configuration", "error", "commit", "measured", "noise"),
)
# Those that fit next to each other on a laptop's screen.
FIRST_COLUMNS = (
    *("rank", "label", "median_us", "level_low", "level_high", "slower", "apart"),
    *("format", "in_class", "pct_of_floor", "noisy", "history"),
)

_SCHEME_BITS = re.compile(r"(?<![a-z])w(\d+)a(\d+|x)")
_MAX_EXAMPLES = 3  # of each class


def accuracy_class(weight_bits: int, act_bits: int) -> int:
    """Return the bits of the narrower operand of a format, by which its loss is judged."""
    return min(bits for bits in (weight_bits, act_bits or 16, 16) if bits)


def losses_by_class(scores: Sequence[ScoreRow]) -> dict[int, list[str]]:
    """Return measured perplexity increases over fp16, largest first, by class, widest first.

    A scheme's class is that of the bits in its name; `ax` are activations that are as wide as the
    weights, or wider. Schemes without bits in their names are left out.
    """
    groups: dict[tuple[str, str, int, str], dict[str, float]] = {}
    for row in scores:
        if row.metric == PERPLEXITY and row.value:
            of_text = row.model, row.data_hash, row.n_items, row.gpu
            groups.setdefault(of_text, {})[row.scheme] = row.value
    found: dict[int, dict[tuple[str, str], float]] = {}
    for (model, *_), by_scheme in groups.items():
        base = by_scheme.get(FULL_PRECISION)
        for scheme, value in by_scheme.items():
            bits = _SCHEME_BITS.search(scheme)
            if base and bits:
                wide = int(bits[1]) if bits[2] == "x" else int(bits[2])
                of_class = found.setdefault(accuracy_class(int(bits[1]), wide), {})
                of_class[scheme, model] = 100 * (value / base - 1)
    return {
        bits: [
            f"{scheme} {loss:+.2f} % ({model})"
            for (scheme, model), loss in sorted(found[bits].items(), key=lambda item: -item[1])
        ][:_MAX_EXAMPLES]
        for bits in sorted(found, reverse=True)
    }


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
    frame = pd.DataFrame(cells, columns=list(COLUMNS))
    return frame.assign(in_class=frame.groupby("class").cumcount() + 1)


def _cells(
    rank: int, row: LatestRow[ResultRow], fastest: LatestRow[ResultRow], noise: StoredNoise
) -> dict[str, Any]:
    r, level = row.result, row.level_us
    assert level is not None  # leaderboard_frame selects such rows
    against = level_ratio(r, fastest.result, noise) if row is not fastest else None
    return {
        "rank": rank,
        "label": kernel_label(r.kernel, r.variant),
        "format": bits_label(r.operation, r.weight_bits, r.act_bits),
        "class": accuracy_class(r.weight_bits, r.act_bits),
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
