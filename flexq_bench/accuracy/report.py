"""Terminal tables of results: a row per scheme and task, with the comparison to the base."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from flexq_bench.accuracy.results import (
    AT_POSITIONS,
    FULL_PRECISION,
    KL,
    KL_QUANTILES,
    LAYER_ERROR,
    OF_TEXTS,
    PERPLEXITY,
    RANK_CHANGE,
    TOP1,
    TOP5,
    MetricDifference,
    MetricResult,
    difference,
    is_perplexity,
    kl_metric,
)


def texts_table(results: Sequence[MetricResult], *, base: str = FULL_PRECISION) -> Table | None:
    """Tabulate perplexities, their change against `base`, and agreement; None: no texts."""
    rows = [result for result in results if result.metric == PERPLEXITY]
    if not rows:
        return None
    table = _table(
        *("text", "scheme", "perplexity", "±", f"change to {base}", "KL, nats", "top-1"),
        *("tokens", "segments", "context", "BOS", "t/s"),
    )
    for i, row in enumerate(rows):
        by_metric = {f.metric: f for f in results if (f.scheme, f.task) == (row.scheme, row.task)}
        table.add_row(
            row.task,
            row.scheme,
            row.detail if row.value is None else f"{row.value:.3f}",
            "" if row.standard_error is None else f"{row.standard_error:.2f}",
            change_text(row, _base_of(row, results, base)),
            _value(by_metric.get(KL), ".5f"),
            _value(by_metric.get(TOP1), ".4f"),
            f"{row.n_items:,}",
            str(len(row.values) or ""),
            str(row.parameters.get("context", "")),
            str(row.parameters.get("bos", "")),
            f"{row.observed['tokens_per_s']:,.0f}" if "tokens_per_s" in row.observed else "",
            end_section=i + 1 == len(rows) or rows[i + 1].task != row.task,
        )
    return table


def positions_table(results: Sequence[MetricResult], *, base: str = FULL_PRECISION) -> Table | None:
    """Tabulate perplexity and its change by position in the segment; None: segments are short."""
    rows = [result for result in results if result.metric in AT_POSITIONS]
    if not rows:
        return None
    table = _table("text", "scheme", "positions", "perplexity", "±", f"change to {base}", "tokens")
    for row in rows:
        first, last = row.observed["positions"]
        table.add_row(
            row.task,
            row.scheme,
            f"{first} … {last}",
            _value(row, ".3f"),
            "" if row.standard_error is None else f"{row.standard_error:.2f}",
            change_text(row, _base_of(row, results, base)),
            f"{row.n_items:,}",
        )
    return table


def agreement_table(results: Sequence[MetricResult]) -> Table | None:
    """Tabulate each scheme's agreement with the original; None: nothing was compared.

    Columns: KL divergence of tokens in nats, shares of equal likeliest tokens, and the change of
    the true token's rank (log2).
    """
    rows = [result for result in results if result.metric == KL]
    if not rows:
        return None
    quantiles = tuple(KL_QUANTILES)
    table = _table(
        *("text", "scheme", "KL mean", "±"), *quantiles, *("top-1", "top-5", "rank, log2")
    )
    for row in rows:
        by_metric = {f.metric: f for f in results if (f.scheme, f.task) == (row.scheme, row.task)}
        table.add_row(
            row.task,
            row.scheme,
            row.detail if row.value is None else f"{row.value:.5f}",
            "" if row.standard_error is None else f"{row.standard_error:.5f}",
            *(_value(by_metric.get(kl_metric(name)), ".4g") for name in quantiles),
            _value(by_metric.get(TOP1), ".4f"),
            _value(by_metric.get(TOP5), ".4f"),
            _value(by_metric.get(RANK_CHANGE), "+.4f"),
        )
    return table


def tasks_table(results: Sequence[MetricResult], *, base: str = FULL_PRECISION) -> Table | None:
    """Tabulate metrics of lm-eval and their change against `base`; None: no tasks."""
    rows = [result for result in results if result.metric not in OF_TEXTS]
    if not rows:
        return None
    table = _table("task", "metric", "scheme", "value", "±", f"change to {base}", "p", "n")
    for row in rows:
        change = _difference(row, _base_of(row, results, base))
        p_value = change.p_value if change else None
        table.add_row(
            row.task,
            row.metric,
            row.scheme,
            row.detail if row.value is None else f"{row.value:.4f}",
            "" if row.standard_error is None else f"{row.standard_error:.4f}",
            change_text(row, _base_of(row, results, base)),
            "" if p_value is None else f"{p_value:.2g}",
            f"{row.n_items:,}",
        )
    return table


def layers_table(results: Sequence[MetricResult], *, worst: int = 5) -> Table | None:
    """Tabulate the layers with the largest output errors under each scheme; None: not evaluated."""
    rows = [f for f in results if f.metric == LAYER_ERROR and f.values]
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


def change_text(head: MetricResult, base: MetricResult | None) -> str:
    """Format `+0.8 % (+0.7 … +1.0)`; a change smaller than its interval is marked as such."""
    change = _difference(head, base)
    if change is None:
        return ""
    interval = change.interval
    unit = "%" if is_perplexity(head.metric) else "points"
    text = (
        f"{100 * interval.estimate:+.2f} {unit} "
        f"({100 * interval.low:+.2f} … {100 * interval.high:+.2f})"
    )
    return text if change.clear else f"{text}, within noise"


def _difference(head: MetricResult, base: MetricResult | None) -> MetricDifference | None:
    return None if base is None or base is head else difference(base, head)


def _base_of(head: MetricResult, results: Sequence[MetricResult], base: str) -> MetricResult | None:
    return next(
        (f for f in results if (f.scheme, f.task, f.metric) == (base, head.task, head.metric)),
        None,
    )


def _value(result: MetricResult | None, form: str) -> str:
    return "" if result is None or result.value is None else format(result.value, form)


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in names:
        is_text = name in ("text", "task", "scheme", "metric", "layer")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    return table
