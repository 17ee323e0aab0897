"""The table of requests that were served by continuous batching."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import tzinfo
from typing import Any

import pandas as pd
import streamlit as st

from dashboard.spreadsheet import harmless
from dashboard.words import local_time
from db.queries import ServingRow

_GIB = 2**30


def show_servings(rows: Sequence[ServingRow], zone: tzinfo) -> None:
    """A row a scheme and limit; columns with nothing to say stay out."""
    st.subheader("Serving", anchor=False)
    number = st.column_config.NumberColumn
    st.dataframe(
        harmless(pd.DataFrame([_cells(row, zone) for row in rows]).dropna(axis=1, how="all")),
        hide_index=True,
        column_config={
            "tokens/s": number(format="%.1f", help="new tokens, first arrival to last token"),
            "request, s": number(format="%.2f", help="median, from admission to the last token"),
            "95th, s": number(format="%.2f"),
            "99th, s": number(format="%.2f"),
            "token, ms": number(format="%.2f", help="median, between two tokens of a request"),
            "95th, ms": number(format="%.2f"),
            "memory limit, GiB": number(format="%.1f"),
            "weights, GiB": number(format="%.2f"),
            "steady, GiB": number(format="%.2f", help="held once the weights are loaded"),
        },
        key="servings",
    )
    st.caption(
        "Requests that arrived together, served by continuous batching, once each: percentiles are "
        "over requests and tokens, and there is no interval of a repetition."
    )


def _cells(row: ServingRow, zone: tzinfo) -> dict[str, Any]:
    return {
        "scheme": row.scheme,
        "memory limit, GiB": _gib(row.memory_limit_bytes),
        "batch limit": row.batch_limit,
        "requests": row.requests,
        "tokens/s": row.tokens_per_s,
        "request, s": row.latency_p50_s,
        "95th, s": row.latency_p95_s,
        "99th, s": row.latency_p99_s,
        "token, ms": row.token_p50_ms,
        "95th, ms": row.token_p95_ms,
        "weights, GiB": _gib(row.weights_bytes),
        "steady, GiB": _gib(row.steady_memory_bytes),
        "status": row.status,
        "why": row.detail,
        "GPU": row.gpu,
        "weights": row.weights,
        "run": row.run[:8],
        "measured": local_time(row.created_at, zone),
    }


def _gib(count: int | None) -> float | None:
    return None if count is None else count / _GIB
