"""Serving section: throughput and latency by number of concurrent sequences."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from datetime import tzinfo
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from flexq_bench.dashboard.shared.charts import draw_chart, set_layout
from flexq_bench.dashboard.shared.colors import Style
from flexq_bench.dashboard.shared.formatting import in_gib, local_time
from flexq_bench.dashboard.shared.tables import draw_table
from flexq_bench.db.queries import ServingRow

_HEIGHT_PX = 400


def show_servings(rows: Sequence[ServingRow], styles: Mapping[str, Style], zone: tzinfo) -> None:
    """Show the serving section. rows: of one model, GPU and kind of weights."""
    st.header("Serving", anchor=False)
    st.caption(
        "Requests that arrived together, served in order by continuous batching. Latency is the "
        "time from a request's admission to its last token, TTFT to its first. Each was served "
        "once, so there are no intervals. Hollow markers have a memory limit."
    )
    ordered = sorted(rows, key=lambda row: (row.scheme, -row.kv_bits, row.slots))
    number = st.column_config.NumberColumn
    draw_table(
        [_cells(row, zone) for row in ordered],
        drop_empty=True,
        column_config={
            "room, GiB": number(format="%.1f", help="empty: no limit but the GPU's"),
            "tokens/s": number(format="%.0f"),
            "latency p50, s": number(format="%.2f"),
            "latency p95, s": number(format="%.2f"),
            "TTFT p50, ms": number(format="%.1f"),
            "TTFT p95, ms": number(format="%.1f"),
            "between tokens p95, ms": number(format="%.1f"),
            "memory, GiB": number(format="%.1f"),
        },
        key="servings-table",
    )
    served = [row for row in rows if row.tokens_per_s is not None]
    if served:
        draw_chart(serving_curves(served, styles), key="servings")


def serving_curves(rows: Sequence[ServingRow], styles: Mapping[str, Style]) -> go.Figure:
    """Plot new tokens/s over the concurrent sequences, a line per scheme and KV cache width."""
    figure = go.Figure()
    for scheme, bits in sorted({(row.scheme, -row.kv_bits) for row in rows}):
        by_slots = sorted(
            (row for row in rows if (row.scheme, -row.kv_bits) == (scheme, bits)),
            key=lambda row: row.slots,
        )
        name = scheme if bits == -16 else f"{scheme}, {-bits}-bit KV"
        style = styles[scheme]
        hollow = [
            f"{style.symbol}-open" if r.memory_limit_bytes else style.symbol for r in by_slots
        ]
        figure.add_scatter(
            name=html.escape(name),
            x=[row.slots for row in by_slots],
            y=[row.tokens_per_s for row in by_slots],
            customdata=[row.latency_p95_s for row in by_slots],
            mode="lines+markers",
            line={"color": style.color, "width": 2, "dash": _DASHES.get(-bits, "solid")},
            marker={"color": style.color, "symbol": hollow, "size": 9},
            hovertemplate="%{x} at a time<br>%{y:,.0f} tokens/s<br>latency p95 "
            "%{customdata:.2f} s<extra>%{fullData.name}</extra>",
        )
    slots = sorted({row.slots for row in rows})
    figure.update_xaxes(title="sequences at a time (log scale)", type="log", tickvals=slots)
    figure.update_yaxes(title="new tokens (1/s)", rangemode="tozero")
    return set_layout(figure, _HEIGHT_PX)


_DASHES = {8: "dash", 4: "dot"}  # by bits of the KV cache


def _cells(row: ServingRow, zone: tzinfo) -> dict[str, Any]:
    return {
        "scheme": row.scheme,
        "KV bits": row.kv_bits,
        "room, GiB": in_gib(row.memory_limit_bytes),
        "at a time": row.slots,
        "requests": row.requests,
        "tokens/s": row.tokens_per_s,
        "latency p50, s": row.latency_p50_s,
        "latency p95, s": row.latency_p95_s,
        "TTFT p50, ms": row.ttft_p50_ms,
        "TTFT p95, ms": row.ttft_p95_ms,
        "between tokens p95, ms": row.token_p95_ms,
        "memory, GiB": in_gib(row.steady_memory_bytes),
        "lengths": row.lengths,
        "status": row.status,
        "why": row.detail,
        "run": row.run[:8],
        "measured": local_time(row.created_at, zone),
    }
