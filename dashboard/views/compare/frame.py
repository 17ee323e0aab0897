"""Two sides beside each other as a table: one row a case, with what says so and how surely."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dashboard.shared.results_frame import interval_cells
from db.queries import DecisionRow, ResultRow
from flexq_bench.runs.stored_comparison import StoredComparison, compare_labels, compare_stored
from flexq_bench.stats import Interval, geometric_mean
from flexq_bench.verdicts import Verdict
from workloads.case import kernel_label

INTERLEAVED = "interleaved A/B, 99 %"
ONE_RUN = "one run, 95 %"
APART = "separate runs, 95 %"

# Times in µs; `ratio` is head / base. _low and _high are ends of the interval that `evidence`
# names: two-sided at 95 %, or one-sided bounds at 99 % of an interleaved A/B measurement.
COLUMNS = {
    "label": "str",
    "model": "str",
    "layer": "str",
    "m": "int64",
    "n": "int64",
    "k": "int64",
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
}
_WORST_FIRST = (Verdict.INCORRECT, Verdict.SLOWER, Verdict.AMBIGUOUS, Verdict.SAME, Verdict.FASTER)


@dataclass(frozen=True, slots=True)
class Pair:
    """A comparison with the results that it is of; None: that side has none."""

    comparison: StoredComparison
    base: ResultRow | None
    head: ResultRow | None


def pairs_of_runs(base: Sequence[ResultRow], head: Sequence[ResultRow]) -> list[Pair]:
    """Every case of two runs or two commits; several results of one case: the last one counts."""
    bases = {(r.case, r.gpu): r for r in base}
    heads = {(r.case, r.gpu): r for r in head}
    comparisons = compare_stored(base, head)
    return [
        Pair(one, bases.get((one.case, one.gpu)), heads.get((one.case, one.gpu)))
        for one in comparisons
    ]


def pairs_of_labels(results: Sequence[ResultRow], base: str, head: str) -> list[Pair]:
    """Every case of the kernel `head`, beside the same of `base`; see `compare_labels`."""
    bases = {_place(r): r for r in results if kernel_label(r.kernel, r.variant) == base}
    heads = {(r.case, r.gpu): r for r in results if kernel_label(r.kernel, r.variant) == head}
    comparisons = compare_labels(results, base, head)
    return [
        Pair(one, bases.get(_place(heads[one.case, one.gpu])), heads[one.case, one.gpu])
        for one in comparisons
    ]


def compare_frame(
    pairs: Sequence[Pair], decisions: Mapping[int, DecisionRow] | None = None
) -> pd.DataFrame:
    """The worst first: wrong, slower, ambiguous, the same, faster, and what has no data last.

    decisions: by series, of interleaved A/B measurements of these two sides: they win over what
    two runs say, and stand alone where neither side's run has the case.
    """
    left = dict(decisions or {})
    rows = []
    for pair in pairs:
        result = pair.head or pair.base
        if result is not None:
            rows.append(_cells(pair, result, left.pop(result.series_id, None)))
    rows += [_decided(row) for row in left.values()]
    rows.sort(key=_badness)
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)


def mean_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Geometric means of head / base by GPU, kernel and evidence, each with its interval.

    Intervals of two kinds are never averaged together.
    """
    usable = frame[frame["ratio"].notna() & (frame["verdict"] != Verdict.INCORRECT.value)]
    rows = []
    for (gpu, label, evidence), part in usable.groupby(["gpu", "label", "evidence"]):
        mean = geometric_mean([_ratio(row) for row in part.to_dict("records")])
        rows.append(
            {
                "gpu": gpu,
                "label": label,
                "cases": len(part),
                "ratio": mean.estimate,
                "ratio_low": mean.low,
                "ratio_high": mean.high,
                "evidence": evidence,
            }
        )
    names = ("gpu", "label", "cases", "ratio", "ratio_low", "ratio_high", "evidence")
    return pd.DataFrame(rows, columns=list(names))


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
        "evidence": ONE_RUN if runs[0] == runs[1] else APART,
        "reason": pair.comparison.reason,
        "base_run": runs[0],
        "head_run": runs[1],
    }
    return row if decision is None else row | _verdict_cells(decision)


def _decided(decision: DecisionRow) -> dict[str, Any]:
    empty = dict.fromkeys(COLUMNS) | dict.fromkeys(("model", "layer", "base_run", "head_run"), "")
    return empty | _case_cells(decision) | _verdict_cells(decision)


def _case_cells(of: ResultRow | DecisionRow) -> dict[str, Any]:
    names = ("m", "n", "k", "stage", "cache", "gpu")
    return {"label": kernel_label(of.kernel, of.variant)} | {n: getattr(of, n) for n in names}


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


def _place(r: ResultRow) -> tuple[str, str, str, int, int, int]:
    return (r.gpu, r.stage, r.cache, r.m, r.n, r.k)


def _ratio(row: Mapping[Any, Any]) -> Interval:
    low, high = row["ratio_low"], row["ratio_high"]
    estimate = row["ratio"]
    return Interval(
        estimate, estimate if pd.isna(low) else low, estimate if pd.isna(high) else high
    )


def _badness(row: Mapping[str, Any]) -> tuple[int, float]:
    order = {verdict.value: i for i, verdict in enumerate(_WORST_FIRST)}
    return (order.get(row["verdict"], len(order)), -(row["ratio"] or 0.0))
