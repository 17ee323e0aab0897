"""Comparisons as a terminal table, as plain values for JSON, and as an exit code."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from flexq_bench.exit_codes import ExitCode
from flexq_bench.results.stored_comparison import StoredComparison
from flexq_bench.verdicts import CaseComparison, Verdict
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.operation import describe, format_values

_STYLES = {
    Verdict.SLOWER: "bold red",
    Verdict.INCORRECT: "bold red",
    Verdict.FASTER: "green",
    Verdict.AMBIGUOUS: "yellow",
    Verdict.NO_DATA: "yellow",
}


def exit_code_of_verdicts(verdicts: Iterable[Verdict]) -> ExitCode:
    """Map verdicts to 1 (any slower or wrong), else 4 (any without data), else 3 (any ambiguous),
    else 0."""
    distinct = set(verdicts)
    if distinct & {Verdict.SLOWER, Verdict.INCORRECT}:
        return ExitCode.REGRESSION
    if Verdict.NO_DATA in distinct:
        return ExitCode.MISSING
    return ExitCode.AMBIGUOUS if Verdict.AMBIGUOUS in distinct else ExitCode.PASS


def comparison_table(results: Sequence[CaseComparison]) -> Table:
    """Tabulate confirmed comparisons, one row per case."""
    table = _table("99 % bounds", "pairs")
    for result in results:
        c, confirmed = result.comparison, result.confirmation
        bounds = (confirmed.low, confirmed.log_ratio, confirmed.high)
        cause = "" if confirmed.cause == "none" else f", {confirmed.cause}"
        early = ", clear" if confirmed.stopped_early else ""
        table.add_row(
            *_case_cells(result.case),
            _microseconds(_median(c.base_us)),
            _microseconds(_median(c.head_us)),
            *_change_cells(*(math.expm1(bound) for bound in bounds)),
            str(confirmed.placements),
            Text(f"{confirmed.verdict}{cause}{early}", style=_STYLES.get(confirmed.verdict, "")),
        )
    return table


def stored_table(results: Sequence[StoredComparison]) -> Table:
    """Tabulate the comparison of two stored runs, one row per case."""
    table = _table("95 % interval")
    nan = math.nan
    for result in results:
        ratio = result.ratio
        bounds = (nan, nan, nan) if ratio is None else (ratio.low, ratio.estimate, ratio.high)
        table.add_row(
            *_case_cells(Case.from_key(result.case)),
            _microseconds(result.base_us.estimate if result.base_us else nan),
            _microseconds(result.head_us.estimate if result.head_us else nan),
            *_change_cells(*(bound - 1 for bound in bounds)),
            Text(str(result.verdict), style=_STYLES.get(result.verdict, "")),
        )
    return table


def undecided_lines(results: Iterable[CaseComparison]) -> list[str]:
    """Name the ambiguous cases with what would decide them, where known."""
    lines = []
    for result in results:
        if result.confirmation.verdict is Verdict.AMBIGUOUS and result.need:
            reason = f"{result.detail}; " if result.detail else ""
            lines.append(f"ambiguous: {result.case.key}: {reason}{result.need}")
    return lines


def problem_lines(results: Iterable[CaseComparison | StoredComparison]) -> list[str]:
    """Explain why cases have no data or are incorrect, with one line per distinct reason."""
    keys_by_reason: dict[tuple[Verdict, str], list[str]] = {}
    for result in results:
        if isinstance(result, CaseComparison):
            confirmed = result.confirmation
            verdict, reason, key = confirmed.verdict, confirmed.reason, result.case.key
            if verdict in (Verdict.NO_DATA, Verdict.INCORRECT):
                reason = result.detail or reason
        else:
            verdict, reason, key = result.verdict, result.reason, result.case
        if verdict in (Verdict.NO_DATA, Verdict.INCORRECT):
            keys_by_reason.setdefault((verdict, reason), []).append(key)
    return [
        f"{verdict}: {keys[0]}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''}: {reason}"
        for (verdict, reason), keys in keys_by_reason.items()
    ]


def counts_line(verdicts: Iterable[Verdict]) -> str:
    """Format the number of each verdict, for example `12 same, 1 slower`."""
    counts = Counter(str(verdict) for verdict in verdicts)
    return ", ".join(f"{counts[word]} {word}" for word in map(str, Verdict) if counts[word])


def as_plain(result: CaseComparison) -> dict[str, Any]:
    """Convert a comparison with its blocks to values for JSON; NaN becomes null."""
    confirmed, comparison = result.confirmation, result.comparison
    blocks = {f.name: getattr(comparison, f.name) for f in dataclasses.fields(comparison)}
    values: dict[str, Any] = _without_nan(
        {
            "case": result.case.key,
            "model": result.case.model,
            "layer": result.case.layer,
            "base": result.base,
            "head": result.head,
            **{f.name: getattr(confirmed, f.name) for f in dataclasses.fields(confirmed)},
            "stopped_early": confirmed.stopped_early,
            "detail": result.detail,
            "pairs_needed": result.pairs_needed,
            "base_median_us": _median(comparison.base_us),
            "head_median_us": _median(comparison.head_us),
            "base_binary": result.base_binary,
            "head_binary": result.head_binary,
            "base_config": result.base_config,
            "head_config": result.head_config,
            "comparison": blocks,
        }
    )
    return values


def stored_as_plain(result: StoredComparison) -> dict[str, Any]:
    return dataclasses.asdict(result)


def _table(*last: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("kernel", "layer", "stage", "shape"):
        table.add_column(name, no_wrap=True)
    for name in ("base µs", "head µs", "change", *last):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    return table


def _case_cells(case: Case) -> list[str]:
    return [
        case.label,
        f"{case.model} {case.layer}".strip(),
        case.stage if case.cache == "cold" else f"{case.stage} {case.cache}",
        describe(case.operation, format_values(case.workload.values, " ")),
    ]


def _change_cells(low: float, estimate: float, high: float) -> tuple[str, str]:
    if math.isnan(estimate):
        return "", ""
    return f"{estimate:+.2%}", f"{low:+.2%} … {high:+.2%}"


def _microseconds(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _median(values: Any) -> float:
    usable = [float(value) for value in values if not math.isnan(value)]
    return statistics.median(usable) if usable else math.nan


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value
