"""Leaderboard: kernels on a layer, fastest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from flexq_bench.dashboard.database import show_empty_database
from flexq_bench.dashboard.pages import PERFORMANCE, app_page
from flexq_bench.dashboard.shared.charts import draw_chart, error_bars, set_size
from flexq_bench.dashboard.shared.colors import Style, kernel_styles
from flexq_bench.dashboard.shared.controls import Controls, page_controls
from flexq_bench.dashboard.shared.formatting import as_code, as_text, stage_in_words, time_zone
from flexq_bench.dashboard.shared.latest_controls import (
    choose_regime,
    choose_sweeps,
    describe_regime,
    show_none_accepted,
)
from flexq_bench.dashboard.shared.latest_frame import frame_of, read_latest, read_rows
from flexq_bench.dashboard.shared.model_places import models_and_layers, places_of_frame
from flexq_bench.dashboard.shared.operation_controls import choose_operation, choose_parameters
from flexq_bench.dashboard.shared.results_table import READ_HELP
from flexq_bench.dashboard.shared.spreadsheet import to_csv
from flexq_bench.dashboard.shared.tables import draw_table, offer_csv
from flexq_bench.dashboard.views.leaderboard.frame import (
    FIRST_COLUMNS,
    accuracy_class,
    leaderboard_frame,
    losses_by_class,
)
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.queries import ResultRow
from flexq_bench.db.records import LINEAR
from flexq_bench.runs import command_lines
from flexq_bench.workloads.operation import parse_values

_ROW_PX, _AROUND_PX = 28, 110
_OTHER = "(shape by N × K)"


@app_page("Leaderboard", section=PERFORMANCE, icon=":material/leaderboard:")
def page(database: Database) -> None:
    """Show the kernels on the selected layer, fastest first."""
    with database.session() as session:
        gpus = queries.gpu_names(session)
    if not gpus:
        show_empty_database(database)
        return
    with page_controls("leaderboard", "Not among these results, so ignored") as controls:
        _show(controls, database, gpus)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Selected parameters of the operation, with stage and cache mode. words: Markdown."""

    words: str
    parameters: str
    stage: str
    cache: str

    def matches(self, r: ResultRow) -> bool:
        return (r.parameters, r.stage, r.cache) == (self.parameters, self.stage, self.cache)


def _show(controls: Controls, database: Database, gpus: Sequence[str]) -> None:
    gpu = controls.select(st.sidebar, "gpu", "GPU", gpus)
    regime = choose_regime(st.sidebar, controls, database, gpu)
    operation = choose_operation(controls, database, gpu)
    sweeps = choose_sweeps(st.sidebar, controls)
    latest = read_latest(database, gpu, regime=regime, sweeps=sweeps, operation=operation)
    if not latest.results:
        show_none_accepted(gpu, regime)
        return
    everything = read_rows(database, latest, latest.default_baseline)
    frame = frame_of(everything, latest.default_baseline)
    choose = _choose_layer if operation == LINEAR else _choose_workload
    shape = choose(controls, frame)
    rows = [row for row in everything if shape.matches(row.result)]
    classes = sorted({accuracy_class(r.result.weight_bits, r.result.act_bits) for r in rows})
    least = controls.select(
        st.container(), "class", "Accuracy class", [0, *classes], 0, radio=True,
        format_func=lambda bits: f"at least {bits} bits" if bits else "any",
    )  # fmt: skip
    rows = [r for r in rows if accuracy_class(r.result.weight_bits, r.result.act_bits) >= least]
    table = leaderboard_frame(rows, latest.noise)
    st.markdown(
        f"{shape.words} on **{as_text(gpu)}** · "
        f"{stage_in_words(shape.stage)}, {as_text(shape.cache)} · "
        f"{describe_regime(frame, regime)}"
    )
    if table.empty:
        sweep = ("sweep", "--kernels", "*", *_sweep_arguments(operation, shape.parameters))
        measure = command_lines.command(*sweep)
        st.info(f"No correct result with a time is stored here. Measure: {as_code(measure)}")
        return
    _show_fastest(table)
    _show_losses(database, least)
    _show_table(table)
    with database.session() as session:
        kernels = queries.kernel_names(session)
    used = [(row.result.kernel, row.result.variant) for row in rows]
    draw_chart(_chart(table, kernel_styles(kernels, used)), key="leaderboard")
    st.caption(
        "The newest accepted result of each kernel. Bars are 95 % intervals of its level, "
        "including run-to-run noise. Two kernels measured in one run are compared within that "
        "run; distinct: the interval of their ratio excludes 1."
    )


def _sweep_arguments(operation: str, parameters: str) -> list[str]:
    values = parse_values(parameters)
    if operation == LINEAR:
        return [part for name, value in values for part in (f"--{name}", str(value))]
    given = (part for name, value in values for part in ("--parameter", f"{name}={value}"))
    return ["--operation", operation, *given]


def _choose_workload(controls: Controls, frame: pd.DataFrame) -> _Shape:
    """Select the parameters of an operation other than linear layers."""
    rows = choose_parameters(controls, st.container(horizontal=True, gap="large"), frame)
    first = rows.iloc[0]
    words = f"**{as_text(str(first['operation']))}** {as_text(str(first['parameters']))}"
    caches = sorted(rows["cache"].unique().tolist())
    cache = controls.select(st.sidebar, "cache", "Cache", caches)
    return _Shape(words, str(first["parameters"]), str(first["stage"]), cache)


def _choose_layer(controls: Controls, frame: pd.DataFrame) -> _Shape:
    """Select model, layer and M, which give N and K; shapes of no model are selected by size."""
    places = places_of_frame(frame)
    sizes = Counter(zip(frame["n"].tolist(), frame["k"].tolist(), strict=True))
    models, _ = models_and_layers(places)
    # A label without a model, such as a sweep's, only repeats the size.
    shapes_of_models = {shape for (m, _), shapes in places.items() if m for shape in shapes}
    shapes_of_no_model = sorted(set(sizes) - shapes_of_models)
    row = st.container(horizontal=True, gap="large")

    def results_of(model: str) -> int:
        return sum(sizes.get(s, 0) for p, of in places.items() if p[0] == model for s in of)

    fullest = max(models, key=results_of, default=_OTHER)
    model = controls.select(
        row, "model", "Model", [*models, *([_OTHER] if shapes_of_no_model else [])], fullest
    )
    if model == _OTHER:
        n, k = controls.select(
            row, "shape", "N × K", shapes_of_no_model,
            format_func=lambda s: f"{s[0]} × {s[1]}", to_url=lambda s: f"{s[0]}x{s[1]}",
        )  # fmt: skip
        name = f"{n} × {k}"
    else:
        _, layers = models_and_layers(places, (model,))
        layer = controls.select(row, "layer", "Layer", layers)
        n, k = sorted(places[model, layer])[0]
        name = f"{model} {layer}"
    on_shape = frame[(frame["n"] == n) & (frame["k"] == k)]
    stages = sorted(on_shape["stage"].unique().tolist())
    stage = controls.select(st.sidebar, "stage", "Stage", stages, format_func=stage_in_words)
    on_shape = on_shape[on_shape["stage"] == stage]
    caches = sorted(on_shape["cache"].unique().tolist())
    cache = controls.select(st.sidebar, "cache", "Cache", caches)
    tokens = sorted(on_shape[on_shape["cache"] == cache]["m"].unique().tolist())
    m = controls.select(row, "m", "M (tokens)", tokens, radio=True)
    words = f"**{as_text(name)}**, N = {n}, K = {k}, **M = {m}**"
    return _Shape(words, f"m={m} n={n} k={k}", stage, cache)


def _show_fastest(table: pd.DataFrame) -> None:
    first = table.iloc[0]
    close = table[table["apart"] == "no"]["label"].tolist()
    words = f"**{as_text(str(first['label']))}** is fastest: {first['median_us']:.4g} µs"
    if close:
        words += f", not distinguishable from {as_text(', '.join(close))}"
    st.markdown(words + ".")


def _show_losses(database: Database, least: int) -> None:
    """Show the measured loss of each accuracy class, with the models it was measured on."""
    with database.session() as session:
        scores = queries.latest_scores(session, queries.scored_models(session))
    lines = [
        f"{bits} bits: {as_text(', '.join(examples))}"
        for bits, examples in losses_by_class(scores).items()
        if bits >= least
    ]
    if lines:
        st.caption(
            "Accuracy class: bits of the narrower operand of a kernel's format. Perplexity against "
            "fp16 of models that were evaluated here. " + "; ".join(lines) + "."
        )


def _show_table(table: pd.DataFrame) -> None:
    column = st.column_config
    number = column.NumberColumn
    shown = table.assign(measured=table["measured"].dt.tz_convert(time_zone(st.context.timezone)))
    config = {
        "rank": number("#", format="%d"),
        "label": column.TextColumn("kernel", pinned=True),
        "format": column.TextColumn(help="bits of weights and activations"),
        "class": number("class, bits", format="%d", help="accuracy class"),
        "in_class": number("# in class", format="%d"),
        "median_us": number("µs", format="%.2f"),
        "level_low": number("low", format="%.2f", help="of the 95 % interval of the level, µs"),
        "level_high": number("high", format="%.2f"),
        "slower": number("× fastest", format="%.3f"),
        "apart": column.TextColumn("distinct", help="from the fastest one"),
        "pct_of_floor": number("% of read", format="%.1f", help=READ_HELP),
        "tops": number("TOPS", format="%.2f"),
        "gb_s": number("GB/s", format="%.0f", help="bytes of weight codes over the time"),
        "correct": column.TextColumn("correct", help="against the reference"),
        "error": number("max error", format="%.2g", help="largest relative error"),
        "noisy": column.TextColumn("noisy", help="its own interval did not converge"),
        "history": column.LinkColumn(display_text="history"),
        "samples": column.LinkColumn(display_text="samples"),
        "run": column.LinkColumn(display_text=r"run=(.*)$"),
        "measured": column.DatetimeColumn(format="YYYY-MM-DD HH:mm"),
        "noise": column.TextColumn("noise of runs", help="source of the run-to-run noise"),
    }
    first = [name for name in FIRST_COLUMNS if name != "noisy" or table["noisy"].any()]
    draw_table(shown, column_order=first, column_config=config, key="leaderboard-table")
    others = ["label", *shown.columns.difference(first, sort=False)]
    with st.expander("Rates, errors, configurations, runs"):
        draw_table(shown[others], column_config=config, key="leaderboard-columns")
    offer_csv(to_csv(table), "leaderboard")


def _chart(table: pd.DataFrame, styles: dict[str, Style]) -> go.Figure:
    """Plot a point per kernel with the interval of its level, fastest on top."""
    figure = go.Figure(
        go.Scatter(
            x=table["median_us"].tolist(),
            y=table["label"].tolist(),
            error_x=error_bars(table["median_us"], table["level_low"], table["level_high"]),
            mode="markers",
            marker={
                "color": [styles[label].color for label in table["label"]],
                "symbol": [styles[label].symbol for label in table["label"]],
                "size": 10,
            },
            hovertemplate="%{y}: %{x:.4g} µs<extra></extra>",
        )
    )
    figure.update_xaxes(title="time (µs)", rangemode="tozero")
    figure.update_yaxes(title="kernel", type="category", autorange="reversed")
    return set_size(figure, _AROUND_PX + _ROW_PX * len(table))
