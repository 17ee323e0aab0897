"""Two compared sides as a DataFrame: one row per case, with its verdict and evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from flexq_bench.dashboard.shared.results_frame import interval_cells, typed
from flexq_bench.db.queries import DecisionRow, ResultRow
from flexq_bench.results.stored_comparison import (
    StoredComparison,
    bases_of,
    compare_labels,
    compare_stored,
)
from flexq_bench.results.stored_noise import StoredNoise
from flexq_bench.stats import Interval, geometric_mean
from flexq_bench.stats.run_noise import with_run_noise
from flexq_bench.verdicts import Verdict
from flexq_bench.workloads.case import kernel_label

INTERLEAVED = "interleaved A/B, 99 %"
ONE_RUN = "one run, 95 %"
APART = "separate runs, 95 % with run-to-run noise"

# Times in µs; `ratio` is head / base. _low and _high are ends of the interval that `evidence`
# names: two-sided at 95 %, or one-sided bounds at 99 % of an interleaved A/B measurement.
COLUMNS = {
    "label": "str",
    "model": "str",
    "layer": "str",
    "operation": "str",
    "parameters": "str",
    "m": "Int64",
    "n": "Int64",
    "k": "Int64",
    "stage": "str",
    "cache": "str",
    "gpu": "str",
    "base_us": "float64",
    "base_us_low": "float64",
    "base_us_high": "float64",
    "head_us": "float64",
    "head_us_low": "float64",
    "head_us_high": "float64",
    "ratio": "float64",
    "ratio_low": "float64",
    "ratio_high": "float64",
    "verdict": "str",
    "evidence": "str",
    "reason": "str",
    "base_run": "str",
    "head_run": "str",
    "regime": "str",
    # Ratio without run-to-run noise, and the series of both sides.
    "measured": "float64",
    "measured_low": "float64",
    "measured_high": "float64",
    "base_series": "int64",
    "head_series": "int64",
}
_WORST_FIRST = (Verdict.INCORRECT, Verdict.SLOWER, Verdict.AMBIGUOUS, Verdict.SAME, Verdict.FASTER)


@dataclass(frozen=True, slots=True)
class Pair:
    """A comparison with its results; None: this side has none."""

    comparison: StoredComparison
    base: ResultRow | None
    head: ResultRow | None


def pairs_of_runs(
    base: Sequence[ResultRow], head: Sequence[ResultRow], noise: StoredNoise | None = None
) -> list[Pair]:
    """Compare all cases of two runs or commits; the last result of a case is used."""
    bases = {(r.case, r.gpu): r for r in base}
    heads = {(r.case, r.gpu): r for r in head}
    comparisons = compare_stored(base, head, noise)
    return [Pair(c, bases.get((c.case, c.gpu)), heads.get((c.case, c.gpu))) for c in comparisons]


def pairs_of_labels(
    results: Sequence[ResultRow],
    base: str,
    head: str,
    noise: StoredNoise | None = None,
    same_runs: Sequence[ResultRow] = (),
) -> list[Pair]:
    """Compare all cases of the kernel `head` with those of `base`; see `compare_labels`."""
    base_of = bases_of(results, same_runs, base)
    heads = {(r.case, r.gpu): r for r in results if kernel_label(r.kernel, r.variant) == head}
    comparisons = compare_labels(results, base, head, noise, beside=same_runs)
    return [Pair(c, base_of(heads[c.case, c.gpu]), heads[c.case, c.gpu]) for c in comparisons]


def compare_frame(
    pairs: Sequence[Pair], decisions: Mapping[int, DecisionRow] | None = None
) -> pd.DataFrame:
    """Return rows sorted by verdict: incorrect, slower, ambiguous, same, faster, no data.

    decisions: by series, of interleaved A/B measurements of these two sides. They replace verdicts
    from separate runs, and add rows for cases that neither run has.
    """
    remaining = dict(decisions or {})
    rows = []
    for pair in pairs:
        result = pair.head or pair.base
        if result is not None:
            rows.append(_cells(pair, result, remaining.pop(result.series_id, None)))
    rows += [_decision_cells(row) for row in remaining.values()]
    rows.sort(key=_sort_key)
    return typed(pd.DataFrame(rows, columns=list(COLUMNS)), COLUMNS)


def mean_rows(frame: pd.DataFrame, noise: StoredNoise | None = None) -> pd.DataFrame:
    """Return geometric means of head / base with intervals, by GPU, kernel, regime and evidence.

    Intervals of different evidence are not combined. noise: of separate runs; noise common to all
    cases of a run does not average out, so it is added to the mean, not to each case.
    """
    usable = frame[frame["ratio"].notna() & (frame["verdict"] != Verdict.INCORRECT.value)]
    rows = []
    for (gpu, label, regime, evidence), part in usable.groupby(
        ["gpu", "label", "regime", "evidence"]
    ):
        mean = _mean(part, noise if evidence == APART else None)
        rows.append(
            {
                "gpu": gpu,
                "label": label,
                "cases": len(part),
                "ratio": mean.estimate,
                "ratio_low": mean.low,
                "ratio_high": mean.high,
                "evidence": evidence,
                "regime": regime,
            }
        )
    names = ("gpu", "label", "cases", "ratio", "ratio_low", "ratio_high", "evidence", "regime")
    return pd.DataFrame(rows, columns=list(names))


def _mean(part: pd.DataFrame, noise: StoredNoise | None) -> Interval:
    rows = part.to_dict("records")
    if noise is None:
        return geometric_mean([_ratio(row) for row in rows])
    measured = geometric_mean([_ratio(row, "measured") for row in rows])
    sides = [[int(row[f"{side}_series"]) for row in rows] for side in ("base", "head")]
    for series in sides:
        measured = with_run_noise(measured, noise.of_mean(series))
    return measured


def _cells(pair: Pair, result: ResultRow, decision: DecisionRow | None) -> dict[str, Any]:
    runs = [side.run if side is not None else "" for side in (pair.base, pair.head)]
    row = {
        **_case_cells(result),
        "model": result.model,
        "layer": result.layer,
        **interval_cells("base_us", pair.comparison.base_us),
        **interval_cells("head_us", pair.comparison.head_us),
        **interval_cells("ratio", pair.comparison.ratio),
        "verdict": pair.comparison.verdict.value,
        "evidence": _evidence(pair),
        "reason": pair.comparison.reason,
        "base_run": runs[0],
        "head_run": runs[1],
        "regime": result.regime or "",
        **interval_cells("measured", pair.comparison.measured),
        **_series_cells(pair.comparison),
    }
    return row if decision is None else row | _verdict_cells(decision)


def _evidence(pair: Pair) -> str:
    """Return the kind of evidence; empty: no ratio."""
    if pair.comparison.ratio is None or pair.base is None or pair.head is None:
        return ""
    return ONE_RUN if pair.base.run == pair.head.run else APART


def _series_cells(comparison: StoredComparison) -> dict[str, int]:
    base, head = comparison.series or (-1, -1)
    return {"base_series": base, "head_series": head}


def _decision_cells(decision: DecisionRow) -> dict[str, Any]:
    texts = ("model", "layer", "base_run", "head_run", "regime")
    empty: dict[str, Any] = dict.fromkeys(COLUMNS) | dict.fromkeys(texts, "")
    empty |= dict.fromkeys(("base_series", "head_series"), -1)
    return empty | _case_cells(decision) | _verdict_cells(decision)


def _case_cells(of: ResultRow | DecisionRow) -> dict[str, Any]:
    names = ("operation", "m", "n", "k", "stage", "cache", "gpu")
    parameters = of.shape if isinstance(of, DecisionRow) else of.parameters
    cells = {"label": kernel_label(of.kernel, of.variant), "parameters": parameters}
    return cells | {name: getattr(of, name) for name in names}


def _verdict_cells(decision: DecisionRow) -> dict[str, Any]:
    logs = (decision.log_ratio, decision.log_ratio_low, decision.log_ratio_high)
    estimate, low, high = (None if log is None else math.exp(log) for log in logs)
    return {
        "ratio": estimate,
        "ratio_low": low,
        "ratio_high": high,
        "verdict": decision.verdict,
        "evidence": INTERLEAVED,
        "reason": decision.reason,
    }


def _ratio(row: Mapping[Any, Any], name: str = "ratio") -> Interval:
    estimate, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
    return Interval(
        estimate, estimate if pd.isna(low) else low, estimate if pd.isna(high) else high
    )


def _sort_key(row: Mapping[str, Any]) -> tuple[int, float]:
    order = {verdict.value: i for i, verdict in enumerate(_WORST_FIRST)}
    return (order.get(row["verdict"], len(order)), -(row["ratio"] or 0.0))
