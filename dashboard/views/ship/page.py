"""What should I ship? Checkpoints of a model that keep a tolerated loss, fastest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from flexq_bench.accuracy.results import FULL_PRECISION, PERPLEXITY
from flexq_bench.dashboard.database import command_on
from flexq_bench.dashboard.pages import ACCURACY, app_page
from flexq_bench.dashboard.shared.charts import draw_chart
from flexq_bench.dashboard.shared.colors import scheme_styles
from flexq_bench.dashboard.shared.controls import Controls, page_controls
from flexq_bench.dashboard.shared.formatting import as_text
from flexq_bench.dashboard.shared.tables import draw_table
from flexq_bench.dashboard.views.pareto import charts
from flexq_bench.dashboard.views.pareto.frame import Setting, pareto_frame, stored_checkpoints
from flexq_bench.dashboard.views.ship.choice import (
    MEMORY,
    MORE_TEXT,
    NOT_DECODED,
    NOT_EVALUATED,
    NOT_GATED,
    TIME,
    full_precision,
    indistinct,
    judged_checkpoints,
    ranked,
)
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.queries import GateRow

_LOSSES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # perplexity increase, percent
_DEFAULT_LOSS = 1.0
_ORDERS = {TIME: "time of a token", MEMORY: "memory"}


@app_page("What should I ship?", section=ACCURACY, icon=":material/local_shipping:", address="ship")
def page(database: Database) -> None:
    """Rank the checkpoints of the selected model, and say why the others are excluded."""
    with database.session() as session:
        models = sorted({*queries.scored_models(session), *queries.decoded_models(session)})
    if not models:
        st.info(
            "No model was evaluated or decoded. Evaluate a checkpoint: "
            f"{_evaluate(database)}, then {command_on(database, 'decode', 'FOLDER')}"
        )
        return
    with page_controls("ship", "Not stored, so ignored") as controls:
        _show(controls, database, models)


def _show(controls: Controls, database: Database, models: Sequence[str]) -> None:
    row = st.container(horizontal=True, gap="large")
    with database.session() as session:
        full = [m for m in models if queries.latest_gates(session, m)]
    model = controls.select(row, "model", "Model", models, next(iter(full), models[0]))
    with database.session() as session:
        scores = [s for s in queries.model_scores(session, model) if s.metric == PERPLEXITY]
        gates = queries.latest_gates(session, model)
        decodes = queries.latest_decodes(session, model=model)
    texts = sorted({score.task for score in scores})
    text = controls.select(row, "text", "Text", texts) if texts else ""
    checkpoints, own = stored_checkpoints(database, model, [s for s in scores if s.task == text])
    everything = [*decodes, *own]
    gpus = sorted({d.gpu for d in everything})
    gpu = controls.select(row, "gpu", "GPU", gpus) if gpus else ""
    settings = sorted({Setting.of(d) for d in everything if d.gpu == gpu})
    setting = _choose_setting(controls, row, settings)
    loss = controls.select(
        row, "loss", "Tolerated loss", _LOSSES, _DEFAULT_LOSS, format_func=lambda v: f"{v:g} %"
    )
    by = controls.select(row, "by", "Rank by", list(_ORDERS), format_func=_ORDERS.__getitem__)
    frame = judged_checkpoints(pareto_frame(checkpoints, own, setting), gates, loss)
    frame = frame[frame["scheme"] != FULL_PRECISION]
    base = full_precision(everything, setting)
    chosen = ranked(frame, by)
    _show_answer(chosen, base, model, text, loss, by)
    _show_chart(frame, base)
    _show_excluded(frame[~frame.index.isin(chosen.index)], database)
    _show_other_gates(gates, frame)
    if setting is None:
        st.caption(f"{as_text(model)} was not decoded: {command_on(database, 'decode', 'FOLDER')}")


def _choose_setting(controls: Controls, row: Any, settings: Sequence[Setting]) -> Setting | None:
    if not settings:
        return None
    batches = sorted({s.batch for s in settings})
    batch = controls.select(row, "batch", "Batch", batches)
    of_batch = [s for s in settings if s.batch == batch]
    return controls.select(
        row, "tokens", "Tokens", of_batch,
        format_func=lambda s: f"{s.prompt_tokens} in, {s.new_tokens} out",
        to_url=lambda s: f"{s.prompt_tokens}-{s.new_tokens}",
    )  # fmt: skip


def _show_answer(
    chosen: pd.DataFrame, base: Any, model: str, text: str, loss: float, by: str
) -> None:
    if chosen.empty:
        st.info(
            f"No checkpoint of {as_text(model)} has passed its gate, keeps {loss:g} % and was "
            "decoded here: the table says what each lacks.",
            icon=":material/rule:",
        )
    else:
        first = chosen.iloc[0]
        near = indistinct(chosen) if by == TIME else []
        st.success(
            f"**{as_text(str(first['scheme']))}**: {first['token_ms']:.3f} ms a token, "
            f"{first['memory_gib']:.2f} GiB, perplexity of {as_text(text)} "
            f"{first['increase']:+.2f} % ({first['low']:+.2f} to {first['high']:+.2f})"
            + (f"; not distinguishable in time: {as_text(', '.join(near))}" if near else ""),
            icon=":material/local_shipping:",
        )
    rows: list[dict[Any, Any]] = chosen.to_dict("records")
    if base:
        rows.append(
            {"rank": None, "scheme": FULL_PRECISION, "increase": 0.0, "gate": "the reference"}
            | dict(base)
        )
    if rows:
        number = st.column_config.NumberColumn
        draw_table(
            pd.DataFrame(rows),
            column_order=(
                *("rank", "scheme", "checkpoint", "token_ms", "token_low", "token_high"),
                *("memory_gib", "memory_is", "increase", "low", "high", "gate", "through"),
            ),
            column_config={
                "rank": number("#", format="%d"),
                "token_ms": number("token, ms", format="%.3f"),
                "token_low": number("from", format="%.3f", help="of the 95 % interval, ms"),
                "token_high": number("to", format="%.3f"),
                "memory_gib": number("memory, GiB", format="%.3f"),
                "memory_is": "memory of",
                "increase": number("loss, %", format="%.3f", help="perplexity increase over fp16"),
                "low": number("least", format="%.3f", help="of the 95 % interval of the loss"),
                "high": number("most", format="%.3f"),
            },
            key="chosen",
        )


def _show_chart(frame: pd.DataFrame, base: Any) -> None:
    drawn = frame.dropna(subset=["token_ms", "increase"])
    if drawn.empty:
        return
    if base:
        point = {"scheme": FULL_PRECISION, "checkpoint": "", "speed_of": "", "increase": 0.0}
        drawn = pd.concat([drawn, pd.DataFrame([point | {"low": 0.0, "high": 0.0} | dict(base)])])
    figure = charts.against(drawn, scheme_styles(drawn["scheme"]), TIME, "time of a token (ms)")
    draw_chart(figure, key="choice")


def _show_excluded(excluded: pd.DataFrame, database: Database) -> None:
    if excluded.empty:
        return
    st.header("Excluded", anchor=False)
    commands = _commands(database)
    shown = excluded.assign(next=[commands.get(gap, "") for gap in excluded["gap"]])
    number = st.column_config.NumberColumn
    draw_table(
        shown,
        column_order=("scheme", "reasons", "next", "checkpoint", "gate", "increase", "token_ms"),
        column_config={
            "reasons": st.column_config.TextColumn("why", width="large"),
            "next": st.column_config.TextColumn("the command that fills the gap", width="large"),
            "increase": number("loss, %", format="%.3f"),
            "token_ms": number("token, ms", format="%.3f"),
        },
        key="excluded",
    )


def _show_other_gates(gates: Sequence[GateRow], frame: pd.DataFrame) -> None:
    """Name gates of schemes of which no checkpoint was evaluated and none was decoded."""
    others = [gate for gate in gates if gate.scheme not in set(frame["scheme"])]
    if others:
        words = ", ".join(f"{gate.scheme} ({gate.verdict})" for gate in others)
        st.caption(f"Gates of schemes without a checkpoint here: {as_text(words)}.")


def _evaluate(database: Database) -> str:
    return command_on(
        database, "accuracy", "--model", "DIR", "--checkpoint", "FOLDER", "--data", "FILE"
    )


def _commands(database: Database) -> dict[str, str]:
    """Return the command line that fills each gap, as text."""
    evaluate = ("accuracy", "--model", "DIR", "--checkpoint", "FOLDER", "--data", "FILE")
    commands = {
        NOT_EVALUATED: evaluate,
        MORE_TEXT: (*evaluate, "--max-tokens", "200000"),
        NOT_GATED: ("gate", *evaluate),
        NOT_DECODED: ("decode", "FOLDER"),
    }
    return {gap: command_on(database, *words).strip("`") for gap, words in commands.items()}
