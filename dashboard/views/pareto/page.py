"""Pareto: perplexity increase of a model's checkpoints over decode time and memory."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from flexq_bench.accuracy.results import PERPLEXITY
from flexq_bench.dashboard.database import command_on
from flexq_bench.dashboard.pages import ACCURACY, app_page
from flexq_bench.dashboard.shared.charts import draw_chart
from flexq_bench.dashboard.shared.colors import scheme_styles
from flexq_bench.dashboard.shared.controls import Controls
from flexq_bench.dashboard.shared.formatting import as_text
from flexq_bench.dashboard.shared.tables import draw_table
from flexq_bench.dashboard.views.pareto import charts
from flexq_bench.dashboard.views.pareto.frame import (
    RANDOM_WEIGHTS,
    Setting,
    pareto_frame,
    stored_checkpoints,
)
from flexq_bench.db import queries
from flexq_bench.db.engine import Database

_EVALUATE = ("accuracy", "--model", "DIR", "--checkpoint", "FOLDER", "--data", "FILE")


@app_page("Pareto", section=ACCURACY, icon=":material/scatter_plot:")
def page(database: Database) -> None:
    """Show each checkpoint of the selected model, text and decode setting as a point."""
    with database.session() as session:
        models = sorted({*queries.scored_models(session), *queries.decoded_models(session)})
    if not models:
        decode = command_on(database, "decode", "FOLDER")
        st.info(
            "No checkpoint was evaluated or decoded yet. Evaluate one: "
            f"{command_on(database, *_EVALUATE)}, then {decode}",
            icon=":material/scatter_plot:",
        )
        return
    controls = Controls("pareto")
    model = controls.select(st.sidebar, "model", "Model", models, always_in_url=True)
    with database.session() as session:
        scores = [s for s in queries.model_scores(session, model) if s.metric == PERPLEXITY]
        texts = sorted({score.task for score in scores})
    text = controls.select(st.sidebar, "text", "Text", texts) if texts else ""
    on_text = [score for score in scores if score.task == text]
    checkpoints, decodes = stored_checkpoints(database, model, on_text)
    settings = sorted({Setting.of(row) for row in decodes})
    setting = (
        controls.select(
            st.container(), "decode", "Decoded", settings,
            format_func=_shown, to_url=_written, radio=True,
        )
        if settings
        else None
    )  # fmt: skip
    for missing in controls.ignored:
        st.warning(f"Not stored, so ignored: {as_text(missing)}.")
    frame = pareto_frame(checkpoints, decodes, setting)
    _show(model, frame, database)


def _show(model: str, frame: pd.DataFrame, database: Database) -> None:
    if frame.empty:
        evaluate = command_on(database, *_EVALUATE)
        st.info(f"No checkpoint of {as_text(model)} was evaluated yet: {evaluate}")
        return
    styles = scheme_styles(frame["scheme"])
    if (frame["speed_of"] == RANDOM_WEIGHTS).any():
        st.warning(
            "Some of these times are of random weights of the model's shapes, not of a checkpoint: "
            "open markers, and the table says which.",
            icon=":material/casino:",
        )
    for across, title, key in (
        ("token_ms", "time of a token (ms)", "time"),
        ("memory_gib", _memory_title(frame), "memory"),
    ):
        st.header("Time" if key == "time" else "Memory", anchor=False)
        if frame.dropna(subset=[across, "increase"]).empty:
            st.caption(
                "Nothing to draw: this needs a checkpoint that was evaluated with fp16 on a text "
                "and decoded, with the same content hash. The table shows what is missing."
            )
            continue
        draw_chart(charts.against(frame, styles, across, title), key=key)
    st.caption("Lower and further left is better. Bars are 95 % intervals; memory has none.")
    st.header("Checkpoints", anchor=False)
    number = st.column_config.NumberColumn
    draw_table(
        frame,
        column_config={
            "increase": number("perplexity increase, %", format="%.3f"),
            "low": number(format="%.3f"),
            "high": number(format="%.3f"),
            "token_ms": number("token, ms", format="%.3f"),
            "token_low": None,
            "token_high": None,
            "memory_gib": number("memory, GiB", format="%.3f"),
            "memory_is": "memory of",
            "speed_of": "time and memory of",
        },
        key="checkpoints",
    )


def _memory_title(frame: pd.DataFrame) -> str:
    kinds = set(frame["memory_is"]) - {""}
    known = {"peak": "peak memory", "weights": "packed weights"}
    return f"{' or '.join(known[kind] for kind in sorted(kinds)) or 'memory'} (GiB)"


def _shown(setting: Setting) -> str:
    return (
        f"{setting.gpu}, batch {setting.batch}, {setting.prompt_tokens} in, "
        f"{setting.new_tokens} out"
    )


def _written(setting: Setting) -> str:
    lengths = f"{setting.batch}-{setting.prompt_tokens}-{setting.new_tokens}"
    return f"{setting.gpu.replace(' ', '-')}-{lengths}"
