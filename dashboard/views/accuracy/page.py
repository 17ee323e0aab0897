"""Accuracy: loss of each scheme against the unquantized model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import streamlit as st

from flexq_bench.accuracy.results import FULL_PRECISION, OF_TEXTS, PERPLEXITY
from flexq_bench.dashboard.database import command_on
from flexq_bench.dashboard.pages import ACCURACY, app_page
from flexq_bench.dashboard.shared.charts import draw_chart
from flexq_bench.dashboard.shared.colors import Style, scheme_styles
from flexq_bench.dashboard.shared.controls import Controls
from flexq_bench.dashboard.shared.formatting import as_code, as_text, time_zone
from flexq_bench.dashboard.shared.gates import (
    cause_lines,
    gate_rows,
    layer_rows,
    show_limits,
    token_rows,
)
from flexq_bench.dashboard.shared.tables import draw_table
from flexq_bench.dashboard.views.accuracy import charts
from flexq_bench.dashboard.views.accuracy.frame import (
    Compared,
    Values,
    bases_of,
    compared,
    difference_frame,
    display_name,
    history_frame,
    kind_frame,
    needed_values,
    newest,
    scheme_rows,
    table_rows,
)
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.queries import GateRow, Score

_MAX_COMMITS = 20  # newest commits in the history
_MAX_GATES = 100  # newest gates in the table
_INTERVALS = (
    "Bars are 95 % intervals over the same segments or questions under both; one that includes the "
    "dashed line is a change within noise."
)


@app_page("Accuracy", section=ACCURACY, icon=":material/target:")
def page(database: Database) -> None:
    """Show scores, gates and charts of the selected model."""
    with database.session() as session:
        models = queries.scored_models(session)
    if not models:
        _show_empty(database)
        return
    controls = Controls("accuracy")
    on_top = st.empty()
    model = controls.select(st.sidebar, "model", "Model", models, always_in_url=True)
    with database.session() as session:
        scores = queries.model_scores(session, model)
        latest = newest(scores)
        over_time = _of_last_commits(scores)
        bases = bases_of(latest, scores)
        score_ids = {
            score_id
            for group in (latest, over_time, bases.values())
            for score_id in needed_values(group)
        }
        values = queries.score_values(session, sorted(score_ids))
        names = {release.sha: release.name for release in queries.releases(session)}
        gates = queries.gate_history(session, model, limit=_MAX_GATES)
        shown = [*queries.scored_schemes(session), *map(display_name, scores)]
        styles = scheme_styles(shown)
    rows = compared(latest, values, bases)
    _show_scores(model, latest, rows)
    _show_gates(controls, model, gates, names, database)
    _show_charts(latest, rows, values, styles)
    _show_history(over_time, values, names, styles)
    controls.warn_of_ignored(on_top, "Not stored, so ignored")


def _of_last_commits(scores: Sequence[Score]) -> list[Score]:
    """Return the perplexities at the newest commits that have any, oldest first."""
    perplexities = [score for score in scores if score.metric == PERPLEXITY]
    shas = list(dict.fromkeys(score.commit for score in perplexities))[-_MAX_COMMITS:]
    return [score for score in perplexities if score.commit in set(shas)]


def _show_scores(model: str, latest: Sequence[Score], rows: Sequence[Compared]) -> None:
    if not any(score.scheme == FULL_PRECISION for score in latest):
        st.warning(
            f"{as_text(model)} was never evaluated unquantized ({as_code(FULL_PRECISION)}), so "
            f"there is nothing to compare with: evaluate it under {as_code(FULL_PRECISION)}."
        )
    elif all(score.scheme == FULL_PRECISION for score in latest):
        st.info("Only the unquantized model was evaluated so far: add schemes with --schemes.")
    st.header("Scores", anchor=False)
    number = st.column_config.NumberColumn
    frame = pd.DataFrame(scheme_rows(rows))
    values = frame.select_dtypes("number").columns
    draw_table(
        frame,
        drop_empty=True,
        column_config={name: number(format="%.4f") for name in values}
        | {"scheme": st.column_config.TextColumn(pinned=True)},
        key="scores",
    )
    with st.expander("Every score, with its error, and divergences from the unquantized model"):
        draw_table(
            table_rows(rows),
            drop_empty=True,
            column_config={
                "value": number(format="%.4f"),
                "± standard error": number(format="%.4f"),
                f"{FULL_PRECISION} on the same items": number(
                    format="%.4f",
                    help="reference of the change: the unquantized model on the same number of "
                    "items",
                ),
                "p": number(format="%.2g", help="McNemar's, of questions"),
            },
            key="every-score",
        )
    failed = sum(score.status != "ok" for score in latest)
    if failed:
        st.error(f"{failed} of {len(latest)} evaluations failed: the table says why.")


def _show_charts(
    latest: Sequence[Score],
    rows: Sequence[Compared],
    values: Values,
    styles: Mapping[str, Style],
) -> None:
    frame = difference_frame(rows)
    perplexity = frame[frame["metric"] == PERPLEXITY]
    questions = frame[~frame["metric"].isin(OF_TEXTS)]
    if not perplexity.empty:
        st.header("Perplexity", anchor=False)
        title = f"perplexity against {FULL_PRECISION} (%)"
        draw_chart(charts.losses(perplexity, styles, title), key="perplexity")
        st.caption(f"Lower is better. {_INTERVALS}")
    if not questions.empty:
        st.header("Zero-shot tasks", anchor=False)
        named = questions.assign(task=questions["task"] + " " + questions["metric"])
        title = f"right answers against {FULL_PRECISION} (points)"
        draw_chart(charts.losses(named, styles, title), key="tasks")
        st.caption(f"Higher is better. {_INTERVALS}")
    kinds = kind_frame(latest, values)
    st.header("Sensitivity by kind of layer", anchor=False)
    if kinds.empty:
        st.caption(
            "No output errors of layers are stored: an evaluation on a text computes them if two "
            "copies of the model fit in memory."
        )
    else:
        draw_chart(charts.errors_by_kind(kinds, styles), key="kinds")
        st.caption(
            "Squared error of a layer's outputs, relative to their squared norm, for its inputs in "
            "the quantized model. Points are medians over the layers of a kind, bars extend to "
            "the minimum and the maximum."
        )


def _show_gates(
    controls: Controls,
    model: str,
    gates: Sequence[GateRow],
    names: Mapping[str, str],
    database: Database,
) -> None:
    st.header("Gate history", anchor="gates")
    if not gates:
        gate = ("gate", "accuracy", "--model", "DIR", "--policy", "FILE", "--data", "FILE")
        command = command_on(database, *gate)
        st.caption(f"No gate has judged {as_text(model)} yet. Let one: {command}")
        return
    zone = time_zone(st.context.timezone)
    open_limits = st.column_config.LinkColumn(display_text="show", help="each limit of this gate")
    draw_table(
        gate_rows(gates, model, names, zone),
        column_config={"limits": open_limits},
        key="gates",
    )
    chosen = show_limits(controls, gates, names, zone)
    _show_diagnosis(chosen)
    st.caption(
        f"The newest {_MAX_GATES} verdicts of gates. A change is against "
        f"{as_code(chosen.base)}, with its 95 % interval."
    )


def _show_diagnosis(gate: GateRow) -> None:
    """Show the diagnosis of a failed gate: layers, tokens, other differences."""
    for title, rows in (("Layers", layer_rows(gate)), ("Tokens", token_rows(gate))):
        if rows:
            st.caption(f"{title} that lost most")
            draw_table(rows, key=f"lost-{title}")
    for line in cause_lines(gate):
        st.caption(as_code(line))
    for difference in (gate.diagnosis or {}).get("differing", ()):
        st.caption(f"Not the original's: {as_code(difference)}")


def _show_history(
    scores: Sequence[Score],
    values: Values,
    names: Mapping[str, str],
    styles: Mapping[str, Style],
) -> None:
    st.header("By release", anchor=False)
    frame = history_frame(scores, values, names)
    if frame.empty:
        st.caption(
            f"Not known: at no commit were a scheme and {FULL_PRECISION} both evaluated on one "
            "text."
        )
        return
    for task, rows in frame.groupby("task", sort=False):
        figure = charts.loss_history(rows, styles, str(task))
        draw_chart(figure, key=f"history-{task}")
    st.caption(
        f"The newest {_MAX_COMMITS} commits with a perplexity; a release has its tag's name. "
        f"{_INTERVALS}"
    )


def _show_empty(database: Database) -> None:
    evaluate = ("accuracy", "--model", "DIR", "--schemes", "flexq-w6ax", "--data", "FILE")
    st.info(
        "No model was evaluated yet. Evaluate one on a CPU or a GPU: "
        f"{command_on(database, *evaluate)}",
        icon=":material/target:",
    )
