"""Gain of each optimization of a kernel: its variants as steps, and their chart."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from flexq_bench.dashboard.shared.charts import GREY, LEGEND_ABOVE, error_bars, set_size
from flexq_bench.workloads.case import parse_kernel_label

_FASTER, _SLOWER = "#0072B2", "#E05A00"
_HEIGHT_PX = 460


@dataclass(frozen=True, slots=True)
class Step:
    """A variant and its time with a 95 % interval, µs.

    before: time of the step that it adds to; None: the first step, or a variant on its own.
    """

    label: str
    median_us: float
    low_us: float
    high_us: float
    before: float | None

    @property
    def gain(self) -> float | None:
        """Time of the step before / time of this step; None: there is no step before."""
        return None if self.before is None else self.before / self.median_us


def steps_of(frame: pd.DataFrame, order: Sequence[str]) -> list[Step]:
    """Return the timed variants of one kernel on one shape and M as steps.

    frame: see results_frame.COLUMNS. order: labels in the order of the steps; others come last. A
    variant named `+x` adds x to the step before it.
    """
    timed = frame[frame["is_timed"]].drop_duplicates("label")
    rows = {str(row["label"]): row for row in timed.to_dict("records")}
    known = [label for label in order if label in rows]
    steps: list[Step] = []
    before: float | None = None
    for label in (*known, *sorted(rows.keys() - set(known))):
        row = rows[label]
        median = float(row["median_us"])
        adds = parse_kernel_label(label)[1].startswith("+")
        ends = (row["ci_low_us"], row["ci_high_us"])
        low, high = (median if pd.isna(end) else float(end) for end in ends)
        steps.append(Step(label, median, low, high, before if adds else None))
        if adds or before is None:
            before = median
    return steps


def waterfall(by_tokens: Mapping[int, Sequence[Step]]) -> go.Figure:
    """Draw a waterfall chart for each M: times, and the difference by each step, µs.

    Error bars are the 95 % interval of the time after a step.
    """
    figure = make_subplots(
        cols=len(by_tokens), rows=1, subplot_titles=[f"M = {m}" for m in by_tokens]
    )
    for i, steps in enumerate(by_tokens.values()):
        names = [html.escape(_name(step)) for step in steps]
        figure.add_bar(
            x=names,
            y=[abs((step.before or 0.0) - step.median_us) for step in steps],
            base=[min(step.before or 0.0, step.median_us) for step in steps],
            marker={"color": [_color(step) for step in steps], "opacity": 0.75},
            text=[f"{s.median_us:.4g} µs" if s.gain is None else f"{s.gain:.2f} ×" for s in steps],
            textposition="outside",
            cliponaxis=False,
            hovertext=[_hover(step) for step in steps],
            hovertemplate="%{hovertext}<extra></extra>",
            showlegend=False,
            row=1,
            col=i + 1,
        )
        figure.add_scatter(
            x=names,
            y=[step.median_us for step in steps],
            error_y=error_bars(
                [step.median_us for step in steps],
                [step.low_us for step in steps],
                [step.high_us for step in steps],
                width=6,
            )
            | {"color": GREY},
            mode="markers",
            marker={"color": GREY, "symbol": "line-ew-open", "size": 18},
            hoverinfo="skip",
            showlegend=False,
            row=1,
            col=i + 1,
        )
    for name, color in (("time", GREY), ("faster by", _FASTER), ("slower by", _SLOWER)):
        figure.add_bar(x=[None], y=[None], name=name, marker={"color": color, "opacity": 0.75})
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title="time (µs)", col=1)
    figure.update_xaxes(tickangle=-30, automargin=True)
    legend = LEGEND_ABOVE | {"y": 1.1}
    return set_size(figure, _HEIGHT_PX, top=60, bottom=30, barmode="overlay", legend=legend)


def _name(step: Step) -> str:
    kernel, variant = parse_kernel_label(step.label)
    return variant or kernel


def _color(step: Step) -> str:
    if step.before is None:
        return GREY
    return _FASTER if step.median_us <= step.before else _SLOWER


def _hover(step: Step) -> str:
    gain = "" if step.gain is None else f"<br>{step.gain:.3f} × as fast as the step before"
    return (
        f"<b>{html.escape(step.label)}</b><br>{step.median_us:.5g} µs "
        f"({step.low_us:.5g} to {step.high_us:.5g}){gain}"
    )
