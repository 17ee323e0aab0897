"""Kernels: roofline, speed-up over a baseline, ablation, activation quantization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
import streamlit as st

from flexq_bench.dashboard.database import show_empty_database
from flexq_bench.dashboard.pages import PERFORMANCE, app_page
from flexq_bench.dashboard.shared.charts import draw_chart
from flexq_bench.dashboard.shared.colors import Style, kernel_styles
from flexq_bench.dashboard.shared.controls import Controls, page_controls
from flexq_bench.dashboard.shared.formatting import as_code, as_text, stage_in_words
from flexq_bench.dashboard.shared.latest_controls import (
    choose_regime,
    choose_sweeps,
    describe_regime,
    show_none_accepted,
)
from flexq_bench.dashboard.shared.latest_frame import latest_frame, read_latest
from flexq_bench.dashboard.shared.layer_chart import places_of
from flexq_bench.dashboard.shared.model_places import (
    models_and_layers,
    narrowed_to,
    places_of_frame,
)
from flexq_bench.dashboard.shared.operation_controls import (
    axes_of,
    choose_operation,
    choose_parameters,
    values_of,
)
from flexq_bench.dashboard.shared.results_frame import narrowed
from flexq_bench.dashboard.shared.tables import SHAPE_COLUMNS, draw_table
from flexq_bench.dashboard.views.kernels.ablation import steps_of, waterfall
from flexq_bench.dashboard.views.kernels.linear_overhead import (
    overhead_by_layer,
    runs_of_linear,
    stages_frame,
)
from flexq_bench.dashboard.views.kernels.over_parameter import over_parameter
from flexq_bench.dashboard.views.kernels.roofline import roofline, roofline_frame
from flexq_bench.dashboard.views.kernels.speedup_map import speedup_map, widest_percent
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.queries import Filters, ResultRow
from flexq_bench.db.records import LINEAR
from flexq_bench.runs import command_lines

_ROOFLINE, _MAP, _ABLATION, _STAGES = "roofline", "heat map", "ablation", "gemm against linear"
_TIMES = "times"  # of operations other than linear
_IN_WORDS = {_STAGES: "activation quantization"}  # view -> label, where it differs from the URL
_MAX_MAPS = 4  # maximum number of M below each other
_EVIDENCE = (
    "The newest accepted result of every kernel and shape. Bars are 95 % intervals of levels: the "
    "uncertainty within a run, and run-to-run noise."
)


@app_page("Kernels", section=PERFORMANCE, icon=":material/speed:")
def page(database: Database) -> None:
    """Show the selected view of a GPU."""
    with database.session() as session:
        gpus = queries.gpu_names(session)
    if not gpus:
        show_empty_database(database)
        return
    with page_controls("kernels", "Not among these results, so ignored") as controls:
        points = _show(controls, database, gpus)
    if points is not None:
        _show_reach(points)


@dataclass(frozen=True, slots=True)
class _Shown:
    """Inputs of every view: the filtered results of a GPU, and the styles of kernels."""

    database: Database
    gpu: str
    results: Sequence[ResultRow]
    frame: pd.DataFrame
    baseline: str
    styles: dict[str, Style]


def _show(controls: Controls, database: Database, gpus: Sequence[str]) -> pd.DataFrame | None:
    """Show the controls and the view; return the points of a roofline for its summary table."""
    gpu = controls.select(st.sidebar, "gpu", "GPU", gpus)
    operation = choose_operation(controls, database, gpu)
    views = _VIEWS if operation == LINEAR else {_TIMES: _show_times}
    view = controls.select(
        st.container(), "view", "Show", list(views), radio=True,
        format_func=lambda name: _IN_WORDS.get(name, name),
    )  # fmt: skip
    regime = choose_regime(st.sidebar, controls, database, gpu)
    sweeps = choose_sweeps(st.sidebar, controls)
    latest = read_latest(database, gpu, regime=regime, sweeps=sweeps, operation=operation)
    with database.session() as session:
        kernels = queries.kernel_names(session)
    if not latest.results:
        show_none_accepted(gpu, regime)
        return None
    baseline = controls.select(
        st.sidebar, "baseline", "Baseline", latest.labels, latest.default_baseline
    )
    frame = latest_frame(database, latest, baseline)
    st.markdown(f"**{as_text(gpu)}** · {describe_regime(frame, regime)}")
    narrow = _narrow(controls, frame, operation)
    if narrow.empty:
        st.info("No result passes all filters: remove one, or clear them all.")
        return None
    used = zip(frame["kernel"], frame["variant"], strict=True)
    styles = kernel_styles(kernels, used)
    shown = _Shown(database, gpu, latest.results, narrow, baseline, styles)
    return views[view](controls, shown)


def _narrow(controls: Controls, frame: pd.DataFrame, operation: str) -> pd.DataFrame:
    kernel = controls.multiselect(st.sidebar, "kernel", "Kernel", sorted(frame["kernel"].unique()))
    if operation != LINEAR:
        return narrowed(
            frame, {"kernel": kernel, "cache": (_choose(controls, frame, "cache", "Cache"),)}
        )
    places = places_of_frame(frame)
    models, _ = models_and_layers(places)
    model = controls.multiselect(st.sidebar, "model", "Model", models)
    _, layers = models_and_layers(places, model)
    layer = controls.multiselect(st.sidebar, "layer", "Layer", layers)
    cache = _choose(controls, frame, "cache", "Cache")
    narrow = narrowed(frame, {"kernel": kernel, "cache": (cache,)})
    return narrowed_to(narrow, places, model, layer)


def _choose(controls: Controls, frame: pd.DataFrame, column: str, label: str) -> str:
    options = sorted(frame[column].unique().tolist())
    in_words = stage_in_words if column == "stage" else str
    chosen: str = controls.select(st.sidebar, column, label, options, format_func=in_words)
    return chosen


def _noisy_in_words(frame: pd.DataFrame) -> str:
    noisy = int(frame["noisy"].sum())
    return f" {noisy} noisy, marked ~: their own intervals did not converge." if noisy else ""


def _stage_of(controls: Controls, shown: _Shown) -> pd.DataFrame:
    stage = _choose(controls, shown.frame, "stage", "Stage")
    return shown.frame[shown.frame["stage"] == stage]


def _show_roofline(controls: Controls, shown: _Shown) -> pd.DataFrame | None:
    points = roofline_frame(_stage_of(controls, shown))
    tokens = sorted(points["m"].unique().tolist())
    chosen = controls.multiselect(st.container(), "m", "M (tokens)", tokens)
    points = narrowed(points, {"m": chosen})
    if points.empty:
        st.info("No floor was measured with these results, so there is no roof to draw.")
        return None
    draw_chart(roofline(points, shown.styles), key="roofline")
    st.caption(
        f"{_EVIDENCE} The roof is the time of reading the packed weights, measured on this GPU in "
        "the same run; it counts bytes of codes, not of scales. No peak of the tensor cores was "
        "measured, so none is drawn. Points of one intensity are drawn side by side. A kernel "
        "that prefetches weights while the previous launch still runs can exceed its floor."
        + _noisy_in_words(points)
    )
    return points


def _show_reach(points: pd.DataFrame) -> None:
    """Show the percentage of the floor that each kernel reaches."""
    best = (
        points.sort_values("pct_of_floor", ascending=False)
        .groupby("label")
        .agg(
            shapes=("reach", "size"),
            lowest=("pct_of_floor", "min"),
            median=("pct_of_floor", "median"),
            highest=("pct_of_floor", "max"),
        )
    )
    table = best.sort_values("median", ascending=False).reset_index()
    columns = {
        name: st.column_config.NumberColumn(f"{name}, % of read", format="%.1f")
        for name in ("lowest", "median", "highest")
    }
    draw_table(
        table.rename(columns={"label": "kernel", "shapes": "results"}),
        column_config=columns,
        key="roofline-table",
    )
    st.caption("100 · floor / time of each result that is drawn, by kernel.")


def _show_map(controls: Controls, shown: _Shown) -> None:
    frame = _stage_of(controls, shown)
    tokens = sorted(frame["m"].unique().tolist())
    fullest = frame.groupby("m")["speedup"].count().sort_values(ascending=False, kind="stable")
    nothing = f"the {_MAX_MAPS} with the most results"
    chosen = controls.multiselect(st.container(), "m", "M (tokens)", tokens, placeholder=nothing)
    drawn = frame[frame["m"].isin(list(chosen or fullest.index)[:_MAX_MAPS])]
    compared = drawn["speedup"].notna() & (drawn["label"] != shown.baseline)
    st.header(f"Speed-up over {as_text(shown.baseline)}", anchor=False)
    if not compared.any():
        st.info(
            f"{as_text(shown.baseline)} and another kernel were never timed on the same shape: "
            "choose another baseline, or measure both: "
            f"{as_code(command_lines.command('run', 'paper-fig10'))}"
        )
        return
    draw_chart(speedup_map(drawn, shown.baseline), key="map")
    apart = int((~drawn.loc[compared, "one_run"]).sum())
    st.caption(
        f"{_EVIDENCE} A result is divided by the baseline of its own run; if that run has "
        f"none, by the newest one, with the noise of both runs: {apart} of {int(compared.sum())} "
        "ratios are of two separate runs, marked †. ± is half of the ratio's interval, "
        f"{widest_percent(drawn[compared]):.1f} % at most, and shown on hovering. "
        "Layers as in Figure 10 of FlexQ (arXiv:2508.04405)." + _noisy_in_words(drawn[compared])
    )


def _show_ablation(controls: Controls, shown: _Shown) -> None:
    frame = _stage_of(controls, shown)
    counted = frame[frame["is_timed"]].groupby("kernel")["label"].nunique()
    steps = sorted(counted[counted > 1].index)
    if not steps:
        measure = as_code(command_lines.command("run", "paper-table6"))
        st.info(f"No kernel has two variants here. Measure the steps of FlexQ's: {measure}")
        return
    row = st.container(horizontal=True, gap="large")
    kernel = controls.select(row, "steps", "Steps of", steps)
    of_kernel = frame[(frame["kernel"] == kernel) & frame["is_timed"]]
    variants = of_kernel.groupby(["model", "layer", "n", "k"])["label"].transform("nunique")
    of_kernel = of_kernel[variants > 1]
    if of_kernel.empty:
        st.info(f"No shape has two variants of {as_text(kernel)}: measure them on one shape.")
        return
    places = places_of(of_kernel)
    place = controls.select(
        row, "shape", "Shape", places, format_func=lambda shape: shape.name,
        to_url=lambda shape: f"{shape.n}x{shape.k}",
    )  # fmt: skip
    on_shape = of_kernel[(of_kernel["n"] == place.n) & (of_kernel["k"] == place.k)]
    from flexq_bench.kernels import registry  # imports torch, which other views don't need

    order = [*registry.labels("cuda"), *registry.labels("cpu")]
    by_tokens = {
        int(m): steps_of(on_shape[on_shape["m"] == m], order)
        for m in sorted(on_shape["m"].unique())[:_MAX_MAPS]
    }
    draw_chart(waterfall(by_tokens), key="ablation")
    separate = on_shape["run"].nunique() > 1
    st.caption(
        f"{as_text(place.name)}, N = {place.n}, K = {place.k}. {_EVIDENCE} A step whose "
        "name begins with + adds to the one before it; the others stand alone. As in Table 6 of "
        "FlexQ (arXiv:2508.04405)." + (" Some of these are of separate runs." if separate else "")
    )


def _show_stages(controls: Controls, shown: _Shown) -> None:
    with shown.database.session() as session:
        gemm_filters = Filters(runs=runs_of_linear(shown.results), stages=("gemm",))
        same_runs = queries.results_table(session, gemm_filters) if gemm_filters.runs else []
    points = stages_frame(shown.frame, shown.results, same_runs)
    if points.empty:
        both = ("--kernels", "flexq*", "--model", "llama-7b", "--stage", "gemm,linear")
        measure = as_code(command_lines.command("sweep", *both))
        st.info(
            "No kernel was timed both ways on one shape: GEMM only (stage gemm) takes packed "
            "operands, stage linear quantizes and packs the activations too. Measure both: "
            f"{measure}"
        )
        return
    tokens = sorted(points["m"].unique().tolist())
    m = controls.select(st.container(), "tokens", "M (tokens)", tokens, radio=True)
    part = points[points["m"] == m]
    draw_chart(overhead_by_layer(part, shown.styles), key="stages")
    st.caption(
        f"{_EVIDENCE} The cost that papers usually leave out: the time including activation "
        "quantization (stage linear, FP16 activations) over that of the GEMM only (stage gemm)."
        + ("" if part["one_run"].all() else " Some of these ratios are over a gemm of another run.")
        + (
            ""
            if part["one_config"].all()
            else " Where the configurations differ, so does their effect on the ratio."
        )
    )
    number = st.column_config.NumberColumn
    draw_table(
        part.assign(
            added_us=part["median_us"] - part["gemm_us"],
            measured=["one run" if same else "separate runs" for same in part["one_run"]],
            configuration=["same" if same else "different" for same in part["one_config"]],
        ),
        column_order=[
            *("label", "model", "layer", "m", "n", "k", "gemm_us", "median_us", "added_us"),
            *("overhead", "overhead_low", "overhead_high", "measured", "configuration"),
        ],
        column_config=SHAPE_COLUMNS
        | {
            "label": "kernel",
            "gemm_us": number("GEMM only µs", format="%.2f"),
            "median_us": number("with quantization µs", format="%.2f"),
            "overhead": number("with / without", format="%.3f"),
            "overhead_low": number("low", format="%.3f", help="of the 95 % interval"),
            "overhead_high": number("high", format="%.3f", help="of the 95 % interval"),
            "added_us": number("added µs", format="%.2f"),
        },
        key="stages-table",
    )


def _show_times(controls: Controls, shown: _Shown) -> pd.DataFrame | None:
    """Show the times of an operation's kernels over one of its parameters."""
    frame = shown.frame[shown.frame["is_timed"]]
    if frame.empty:
        st.info("No correct result with a time is stored here.")
        return None
    name = str(frame["operation"].iloc[0])
    row = st.container(horizontal=True, gap="large")
    axes = axes_of(name, values_of(frame))
    axis = controls.select(row, "over", "Over", axes) if axes else ""
    part = choose_parameters(controls, row, frame, free=axis)
    if axis:
        draw_chart(over_parameter(part, axis, shown.styles), key="times")
    st.caption(
        f"{_EVIDENCE} The floor is the time of reading as many bytes as the operation must move, "
        "in the same run." + _noisy_in_words(part)
    )
    number = st.column_config.NumberColumn
    draw_table(
        part,
        column_order=[
            "label",
            "parameters",
            "median_us",
            "ci_low_us",
            "ci_high_us",
            "speedup",
            "pct_of_floor",
            "tops",
        ],
        column_config={
            "label": "kernel",
            "parameters": "shape",
            "median_us": number("time µs", format="%.2f"),
            "ci_low_us": number("low", format="%.2f", help="of the 95 % interval of the level"),
            "ci_high_us": number("high", format="%.2f"),
            "speedup": number(f"× {shown.baseline}", format="%.2f"),
            "pct_of_floor": number("% of read", format="%.1f"),
            "tops": number("TOPS", format="%.2f"),
        },
        key="times-table",
    )
    return None


_VIEWS: dict[str, Callable[[Controls, _Shown], pd.DataFrame | None]] = {
    _ROOFLINE: _show_roofline,
    _MAP: _show_map,
    _ABLATION: _show_ablation,
    _STAGES: _show_stages,
}
