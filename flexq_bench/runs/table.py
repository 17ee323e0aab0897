"""Terminal tables of a run's results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from flexq_bench.db.records import Record
from flexq_bench.stats.baseline import (
    BASELINE,
    Result,
    Row,
    half_width_percent,
    shape_key,
)
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.operation import describe
from flexq_bench.workloads.probes import EMPTY_KERNEL, is_probe

_SPEEDUP = -2  # index of the column: the last but one


def results_table(rows: Sequence[Row[Result]], *, with_speedup: bool = True) -> Table:
    """Tabulate results in at most 120 columns, with a rule between shapes.

    with_speedup: include the speedup over the baseline, if one has any.
    """
    with_speedup = with_speedup and any(row.speedup is not None for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("kernel", no_wrap=True)
    table.add_column("layer", no_wrap=True, max_width=26)
    table.add_column("stage", no_wrap=True)
    over = (f"× {BASELINE}",) if with_speedup else ()
    sizes = all(row.result.operation == "linear" for row in rows)
    if not sizes:
        table.add_column("shape", no_wrap=True)
    for name in (*(("M", "N", "K") if sizes else ()), "time µs", "± %", "% of read", *over):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("correct", no_wrap=True)
    for i, row in enumerate(rows):
        ends_shape = i + 1 == len(rows) or shape_key(rows[i + 1].result) != shape_key(row.result)
        cells = _cells(row, sizes=sizes)
        if not with_speedup:
            del cells[_SPEEDUP]
        style = "dim" if is_probe(row.result.kernel) else ""
        table.add_row(*cells, end_section=ends_shape, style=style)
    return table


def problem_lines(results: Iterable[Result], *, limit: int = 10) -> list[str]:
    """Describe problems, the most severe first, with one line per status and detail, `limit` lines
    at most."""
    severity = ("incorrect", "failed", "unsupported", "noisy")
    bad = sorted(
        (r for r in results if r.status in severity), key=lambda r: severity.index(r.status)
    )
    by_reason: dict[tuple[str, str], list[Result]] = {}
    for r in bad:
        by_reason.setdefault((r.status, r.detail), []).append(r)
    lines = []
    for (status, detail), group in list(by_reason.items())[:limit]:
        r = group[0]
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        label = kernel_label(r.kernel, r.variant)
        where = f"{label} {r.stage} {r.cache} {describe(r.operation, r.parameters)}{more}"
        lines.append(f"{status}: {where}: {detail}")
    if len(by_reason) > limit:
        lines.append(f"… and {len(by_reason) - limit} other problems: the dashboard lists them")
    return lines


def _cells(row: Row[Result], *, sizes: bool) -> list[str | Text]:
    r = row.result
    shape = [
        "–" if is_probe(r.kernel) else str(r.m),
        *(("–", "–") if r.kernel == EMPTY_KERNEL else (str(r.n), str(r.k))),
    ]
    return [
        kernel_label(r.kernel, r.variant),
        f"{r.model} {r.layer}".strip(),
        "" if r.kernel == EMPTY_KERNEL else f"{r.stage} {r.cache}".removesuffix(" cold"),
        *(shape if sizes else [_shape_in_words(r)]),
        _number(r.median_us),
        _number(half_width_percent(r), digits=2),
        "" if is_probe(r.kernel) or r.pct_of_floor is None else f"{r.pct_of_floor:.1f}",
        "" if row.speedup is None else f"{row.speedup.estimate:.2f}",
        _verdict(r),
    ]


def case_in_words(record: Record) -> str:
    """Format the key of a record's case; of a probe, which is no GEMM, its name and size."""
    if not is_probe(record.kernel):
        return record.case
    label = kernel_label(record.kernel, record.variant)
    return label if record.kernel == EMPTY_KERNEL else f"{label} {_shape_in_words(record)}"


def _shape_in_words(r: Result) -> str:
    if r.kernel == EMPTY_KERNEL:
        return "–"
    return f"N={r.n} K={r.k}" if is_probe(r.kernel) else describe(r.operation, r.parameters)


def _verdict(result: Result) -> Text:
    if result.status == "incorrect":
        return Text("NO", style="bold red")
    if result.status in ("failed", "unsupported"):
        return Text(result.status, style="red" if result.status == "failed" else "yellow")
    words = ["exact" if result.exact else "yes"]
    if result.status == "noisy":
        words.append("noisy")
    if result.regime == "sustained":
        words.append("sustained")
    return Text(", ".join(words), style="green")


def _number(value: float | None, digits: int = 4) -> str:
    """Format with `digits` significant digits, never in exponential notation."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def result_line(record: Record) -> str:
    """Format a result as one line."""
    case = case_in_words(record)
    if record.median_us is None:
        return f"{case} on {record.gpu}: {record.status}: {record.detail}"
    floor = "" if record.pct_of_floor is None else f", {record.pct_of_floor:.0f} % of read"
    regime = f", {record.regime}" if record.regime == "sustained" else ""
    return f"{case} on {record.gpu}: {record.median_us:.4g} us{floor}, {record.status}{regime}"
