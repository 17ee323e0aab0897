"""Charts of whole models: time per token, throughput, memory."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence

import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import error_bars, log_axis, set_layout
from flexq_bench.dashboard.shared.colors import Style
from flexq_bench.dashboard.shared.formatting import in_gib
from flexq_bench.db.queries import DecodeRow

_HEIGHT_PX = 400
_Interval = tuple[float, float, float]  # low, estimate, high


def token_times(rows: Sequence[DecodeRow], styles: Mapping[str, Style]) -> go.Figure:
    """Plot the median time of a decode step with its 95 % interval over batch size, by scheme."""
    figure = _lines(rows, styles, _token_ms, "ms")
    figure.update_yaxes(title="time of a token (ms, log scale)", **_log(rows, _token_ms))
    return figure


def throughputs(rows: Sequence[DecodeRow], styles: Mapping[str, Style]) -> go.Figure:
    """Plot tokens/s of the whole batch after the first token over batch size, by scheme.

    The interval is the reciprocal of that of the step time.
    """
    figure = _lines(rows, styles, _tokens_per_s, "tokens/s")
    figure.update_yaxes(
        title="tokens of the whole batch (1/s, log scale)", **_log(rows, _tokens_per_s)
    )
    return figure


def memories(rows: Sequence[DecodeRow], styles: Mapping[str, Style]) -> go.Figure:
    """Plot peak memory while decoding over batch size, by scheme; it has no interval."""
    figure = _lines(rows, styles, _memory_gib, "GiB")
    figure.update_yaxes(title="peak memory (GiB)", rangemode="tozero")
    return figure


def _log(
    rows: Sequence[DecodeRow], interval_of: Callable[[DecodeRow], _Interval | None]
) -> dict[str, str]:
    return log_axis(ends[1] for row in rows if (ends := interval_of(row)) is not None)


def _token_ms(row: DecodeRow) -> _Interval | None:
    if row.token_ms is None:
        return None
    low = row.token_ms if row.token_ci_low_ms is None else row.token_ci_low_ms
    high = row.token_ms if row.token_ci_high_ms is None else row.token_ci_high_ms
    return low, row.token_ms, high


def _tokens_per_s(row: DecodeRow) -> _Interval | None:
    times = _token_ms(row)
    if times is None or row.tokens_per_s is None:
        return None
    low, estimate, high = times
    return row.tokens_per_s * estimate / high, row.tokens_per_s, row.tokens_per_s * estimate / low


def _memory_gib(row: DecodeRow) -> _Interval | None:
    gib = in_gib(row.peak_memory_bytes)
    return None if gib is None else (gib, gib, gib)


def _lines(
    rows: Sequence[DecodeRow],
    styles: Mapping[str, Style],
    interval_of: Callable[[DecodeRow], _Interval | None],
    unit: str,
) -> go.Figure:
    figure = go.Figure()
    for scheme in sorted({row.scheme for row in rows}):
        by_batch = sorted((r for r in rows if r.scheme == scheme), key=lambda row: row.batch)
        points = [(row.batch, ends) for row in by_batch if (ends := interval_of(row)) is not None]
        if not points:
            continue
        low, estimates, high = zip(*(ends for _, ends in points), strict=True)
        style = styles[scheme]
        figure.add_scatter(
            name=html.escape(scheme),
            x=[batch for batch, _ in points],
            y=estimates,
            error_y=error_bars(estimates, low, high),
            mode="lines+markers",
            line={"color": style.color, "width": 2},
            marker={"color": style.color, "symbol": style.symbol, "size": 9},
            hovertemplate=f"batch %{{x}}<br>%{{y:.4g}} {unit}<extra>%{{fullData.name}}</extra>",
        )
    batches = sorted({row.batch for row in rows})
    figure.update_xaxes(title="batch (sequences, log scale)", type="log", tickvals=batches)
    return set_layout(figure, _HEIGHT_PX)
