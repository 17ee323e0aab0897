"""Decode: time, throughput and memory of whole models, by scheme and batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import tzinfo
from typing import Any

import streamlit as st

from flexq_bench.dashboard.database import command_on
from flexq_bench.dashboard.pages import ACCURACY, app_page
from flexq_bench.dashboard.shared.charts import draw_chart
from flexq_bench.dashboard.shared.colors import Style, scheme_styles
from flexq_bench.dashboard.shared.controls import Controls
from flexq_bench.dashboard.shared.formatting import as_text, in_gib, local_time, time_zone
from flexq_bench.dashboard.shared.tables import draw_table
from flexq_bench.dashboard.views.decode import charts
from flexq_bench.dashboard.views.decode.serving import show_servings
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.queries import DecodeRow

_Lengths = tuple[int, int]  # prompt, new tokens


@app_page("Decode", section=ACCURACY, icon=":material/speed:")
def page(database: Database) -> None:
    """Show time, throughput and memory of each scheme for the selected model, GPU and lengths."""
    with database.session() as session:
        models = queries.decoded_models(session)
    if not models:
        decode = command_on(database, "decode", "llama-7b")
        st.info(f"No model was decoded yet. Decode one on a GPU: {decode}", icon=":material/speed:")
        return
    controls = Controls("decode")
    model = controls.select(st.sidebar, "model", "Model", models, always_in_url=True)
    with database.session() as session:
        rows = queries.latest_decodes(session, model=model, also_failed=True)
        servings = queries.latest_servings(session, model=model)
        styles = scheme_styles(queries.decoded_schemes(session))
    zone = time_zone(st.context.timezone)
    for name, label in (("gpu", "GPU"), ("weights", "Weights")):
        options = sorted({str(getattr(row, name)) for row in (*rows, *servings)})
        chosen = controls.select(st.sidebar, name, label, options)
        rows = [row for row in rows if getattr(row, name) == chosen]
        servings = [row for row in servings if getattr(row, name) == chosen]
    if rows:
        rows = _narrow(controls, rows)
    for missing in controls.ignored:
        st.warning(f"Never decoded, so ignored: {as_text(missing)}.")
    if rows:
        _show(rows, styles, zone)
    else:
        decode = command_on(database, "decode", model)
        st.info(f"{as_text(model)} was served, not decoded by batch. Decode it: {decode}")
    if servings:
        show_servings(servings, styles, zone)


def _narrow(controls: Controls, rows: Sequence[DecodeRow]) -> list[DecodeRow]:
    """Select the rows of one chart: one KV cache width, and one pair of lengths."""
    widths = sorted({row.kv_bits for row in rows}, reverse=True)
    bits = controls.select(st.sidebar, "kv", "KV cache, bits", widths)
    rows = [row for row in rows if row.kv_bits == bits]
    lengths = sorted({_lengths(row) for row in rows})
    selected = controls.select(
        st.container(),
        "tokens",
        "Tokens",
        lengths,
        lengths[-1],
        format_func=lambda lengths: f"{lengths[0]} in, {lengths[1]} out",
        to_url=lambda lengths: f"{lengths[0]}-{lengths[1]}",
        radio=True,
    )
    return [row for row in rows if _lengths(row) == selected]


def _lengths(row: DecodeRow) -> _Lengths:
    return row.prompt_tokens, row.new_tokens


def _show(rows: Sequence[DecodeRow], styles: Mapping[str, Style], zone: tzinfo) -> None:
    first = rows[0]
    st.caption(
        f"{as_text(first.model)} · {as_text(first.gpu)} · weights: {as_text(first.weights)} · "
        f"{first.prompt_tokens} tokens in, {first.new_tokens} out · a KV cache of {first.kv_bits} "
        "bits. Bars are 95 % intervals over "
        "processes; decoding is greedy."
    )
    timed = [row for row in rows if row.status == "ok" and row.token_ms is not None]
    failed = [row for row in rows if row.status != "ok"]
    if failed:
        st.warning(
            f"{len(failed)} of {len(rows)} decodes have no time: the table says why.",
            icon=":material/error:",
        )
    number = st.column_config.NumberColumn
    draw_table(
        [_cells(row, zone) for row in rows],
        column_config={
            "token, ms": number(format="%.3f"),
            "± %": number(format="%.2f", help="half the 95 % interval, in percent of the median"),
            "95th percentile, ms": number(format="%.3f"),
            "first token, ms": number(format="%.2f"),
            "tokens/s": number(format="%.1f"),
            "weights, GiB": number(format="%.2f"),
            "peak, GiB": number(format="%.2f"),
        },
        key="decodes",
    )
    if not timed:
        st.info("Nothing to draw: no decode of these lengths was timed. The table says why.")
    else:
        st.header("Latency", anchor=False)
        draw_chart(charts.token_times(timed, styles), key="latency")
        st.header("Throughput", anchor=False)
        draw_chart(charts.throughputs(timed, styles), key="throughput")
        st.header("Memory", anchor=False)
        if any(row.peak_memory_bytes is not None for row in timed):
            draw_chart(charts.memories(timed, styles), key="memory")
            st.caption("Maximum of allocated memory while decoding; it has no interval.")
        else:
            st.caption("Not known: a CPU's memory is not counted.")


def _cells(row: DecodeRow, zone: tzinfo) -> dict[str, Any]:
    return {
        "scheme": row.scheme,
        "batch": row.batch,
        "token, ms": row.token_ms,
        "± %": _half_width(row),
        "95th percentile, ms": row.token_p95_ms,
        "first token, ms": row.prefill_ms,
        "tokens/s": row.tokens_per_s,
        "weights, GiB": in_gib(row.weights_bytes),
        "peak, GiB": in_gib(row.peak_memory_bytes),
        "status": row.status,
        "why": row.detail,
        "run": row.run[:8],
        "measured": local_time(row.created_at, zone),
    }


def _half_width(row: DecodeRow) -> float | None:
    if not row.token_ms or row.token_ci_low_ms is None or row.token_ci_high_ms is None:
        return None
    return 100 * (row.token_ci_high_ms - row.token_ci_low_ms) / 2 / row.token_ms
