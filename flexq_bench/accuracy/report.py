"""Findings as tables for people: a row a scheme and task, beside what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from flexq_bench.accuracy.results import (
    FULL_PRECISION,
    KL,
    LAYER_ERROR,
    PERPLEXITY,
    TOP1,
    Difference,
    Finding,
    difference,
)

_OF_TEXTS = {PERPLEXITY, KL, TOP1, LAYER_ERROR}


def texts_table(findings: Sequence[Finding], *, base: str = FULL_PRECISION) -> Table | None:
    """Perplexities, their change against `base`, and how predictions agree; None: no texts."""
    rows = [finding for finding in findings if finding.metric == PERPLEXITY]
    if not rows:
        return None
    table = _table(
        "text", "scheme", "perplexity", "±", f"change to {base}", "KL, nats", "top-1", "t/s"
    )
    for i, row in enumerate(rows):
        beside = {f.metric: f for f in findings if (f.scheme, f.task) == (row.scheme, row.task)}
        table.add_row(
            row.task,
            row.scheme,
            row.detail if row.value is None else f"{row.value:.3f}",
            "" if row.standard_error is None else f"{row.standard_error:.2f}",
            change_text(row, _base_of(row, findings, base)),
            _value(beside.get(KL), ".5f"),
            _value(beside.get(TOP1), ".4f"),
            f"{row.observed['tokens_per_s']:,.0f}" if "tokens_per_s" in row.observed else "",
            end_section=i + 1 == len(rows) or rows[i + 1].task != row.task,
        )
    return table


def tasks_table(findings: Sequence[Finding], *, base: str = FULL_PRECISION) -> Table | None:
    """Metrics of lm-eval and their change against `base`; None: no tasks."""
    rows = [finding for finding in findings if finding.metric not in _OF_TEXTS]
    if not rows:
        return None
    table = _table("task", "metric", "scheme", "value", "±", f"change to {base}", "p", "n")
    for row in rows:
        found = _difference(row, _base_of(row, findings, base))
        p_value = found.p_value if found else None
        table.add_row(
            row.task,
            row.metric,
            row.scheme,
            row.detail if row.value is None else f"{row.value:.4f}",
            "" if row.standard_error is None else f"{row.standard_error:.4f}",
            change_text(row, _base_of(row, findings, base)),
            "" if p_value is None else f"{p_value:.2g}",
            f"{row.n_items:,}",
        )
    return table


def layers_table(findings: Sequence[Finding], *, worst: int = 5) -> Table | None:
    """The layers whose outputs are the most wrong under each scheme; None: not evaluated."""
    rows = [f for f in findings if f.metric == LAYER_ERROR and f.values]
    if not rows:
        return None
    table = _table("scheme", "layer", "relative squared error")
    for row in rows:
        errors = sorted(
            zip(row.values, row.parameters["layers"], strict=True), reverse=True, key=lambda e: e[0]
        )
        for error, name in errors[:worst]:
            table.add_row(row.scheme, name, f"{error:.3g}")
    return table


def change_text(head: Finding, base: Finding | None) -> str:
    """`+0.8 % (+0.7 … +1.0)`; a change smaller than its interval is called that."""
    found = _difference(head, base)
    if found is None:
        return ""
    interval = found.interval
    unit = "%" if head.metric == PERPLEXITY else "points"
    text = (
        f"{100 * interval.estimate:+.2f} {unit} "
        f"({100 * interval.low:+.2f} … {100 * interval.high:+.2f})"
    )
    return text if found.clear else f"{text}, within noise"


def _difference(head: Finding, base: Finding | None) -> Difference | None:
    return None if base is None or base is head else difference(base, head)


def _base_of(head: Finding, findings: Sequence[Finding], base: str) -> Finding | None:
    return next(
        (f for f in findings if (f.scheme, f.task, f.metric) == (base, head.task, head.metric)),
        None,
    )


def _value(finding: Finding | None, form: str) -> str:
    return "" if finding is None or finding.value is None else format(finding.value, form)


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in names:
        left = name in ("text", "task", "scheme", "metric", "layer")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    return table
