"""Chart with a point per kernel and layer, and the order of layers."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from flexq_bench.dashboard.shared.charts import GREY, LEGEND_ABOVE, error_bars, set_size
from flexq_bench.dashboard.shared.colors import Style

_SPREAD = 0.7  # fraction of the distance between layers over which its kernels are spread
_HEIGHT_PX = 440


@dataclass(frozen=True, slots=True)
class Place:
    """Layer of a model, with the shape of its GEMM."""

    model: str
    layer: str
    n: int
    k: int

    @property
    def name(self) -> str:
        """Name for display; a shape without a layer is named by its N and K."""
        return " ".join(part for part in (self.model, self.layer) if part) or f"{self.n}×{self.k}"


def places_of(frame: pd.DataFrame) -> list[Place]:
    """Return the layers of a frame: models by name, layers by size."""
    return sorted({Place(*key) for key in _place_keys(frame)}, key=_order)


def by_layer(frame: pd.DataFrame, value: str, unit: str, styles: Mapping[str, Style]) -> go.Figure:
    """Draw a point with its interval per kernel and layer; layers by size.

    frame: results_frame.COLUMNS, and columns `value`, `value`_low and `value`_high.
    """
    places = places_of(frame)
    position = {place: i for i, place in enumerate(places)}
    labels = sorted(frame["label"].unique())
    figure = go.Figure()
    for i, label in enumerate(labels):
        rows = frame[frame["label"] == label]
        shift = _SPREAD * (i - (len(labels) - 1) / 2) / max(len(labels), 1)
        figure.add_scatter(
            name=html.escape(label),
            x=[position[Place(*key)] + shift for key in _place_keys(rows)],
            y=rows[value].tolist(),
            error_y=error_bars(rows[value], rows[f"{value}_low"], rows[f"{value}_high"], width=3),
            mode="markers",
            marker={"color": styles[label].color, "symbol": styles[label].symbol, "size": 9},
            text=[_hover(row, value, unit) for row in rows.to_dict("records")],
            hovertemplate=f"<b>{html.escape(label)}</b><br>%{{text}}<extra></extra>",
        )
    _label_places(figure, places)
    return set_size(
        figure,
        _HEIGHT_PX,
        top=70,
        legend=LEGEND_ABOVE | {"y": 1.1},
        showlegend=True,
        hoverlabel={"align": "left"},
    )


def _place_keys(frame: pd.DataFrame) -> Iterable[tuple[str, str, int, int]]:
    return zip(frame["model"], frame["layer"], frame["n"], frame["k"], strict=True)


def _order(place: Place) -> tuple[list[tuple[int, str]], int, int, str]:
    """Sort key: models by name in natural order, layers by size."""
    parts = re.findall(r"\d+|\D+", place.model)
    natural = [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
    return (natural, place.n * place.k, place.n, place.layer)


def _label_places(figure: go.Figure, places: Sequence[Place]) -> None:
    """Label layers below the axis and models above it, with a line between models."""
    figure.update_xaxes(
        title="layer",
        tickvals=list(range(len(places))),
        ticktext=[html.escape(place.layer) or f"{place.n}×{place.k}" for place in places],
        range=[-0.5, max(len(places), 1) - 0.5],
        showgrid=False,
        zeroline=False,
    )
    models = list(dict.fromkeys(place.model for place in places))
    for model in models:
        inside = [i for i, place in enumerate(places) if place.model == model]
        figure.add_annotation(
            text=html.escape(model),
            x=(inside[0] + inside[-1]) / 2,
            y=1,
            yref="paper",
            yanchor="bottom",
            showarrow=False,
            font={"color": GREY},
        )
        if inside[0]:
            figure.add_vline(inside[0] - 0.5, line={"color": GREY, "width": 1}, opacity=0.5)


def _hover(row: Mapping[str, object], value: str, unit: str) -> str:
    name = html.escape(" ".join(str(row[part]) for part in ("model", "layer") if row[part]))
    noisy = "<br>noisy: its interval did not converge" if row["status"] == "noisy" else ""
    return (
        f"{name}<br>M={row['m']} N={row['n']} K={row['k']}<br>"
        f"{row[value]:.4g}{unit} ({row[f'{value}_low']:.4g} to {row[f'{value}_high']:.4g})<br>"
        f"median {row['median_us']:.5g} µs ±{row['half_width_pct']:.2g} %{noisy}"
    )
