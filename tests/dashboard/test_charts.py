"""Charts as functions: a frame in, a figure out."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from flexq_bench.dashboard.shared.charts import log_axis
from flexq_bench.dashboard.shared.colors import kernel_styles, scheme_styles
from flexq_bench.dashboard.shared.results_frame import COLUMNS
from flexq_bench.dashboard.views.accuracy.charts import losses
from flexq_bench.dashboard.views.kernels.speedup_map import speedup_map, widest_percent
from flexq_bench.dashboard.views.results import charts

STYLES = kernel_styles(["base", "fast"], [("base", ""), ("fast", "")])


def a_row(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    row |= {
        "label": "fast", "kernel": "fast", "model": "llama-7b", "layer": "o_proj",
        "m": 1, "n": 64, "k": 64, "stage": "gemm", "cache": "cold", "backend": "cuda",
        "gpu": "H200", "run": "r", "is_timed": True, "is_probe": False,
        "speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6,
        "pct_of_floor": 80.0, "pct_of_floor_low": 79.0, "pct_of_floor_high": 82.0,
        "median_us": 2.0, "ci_low_us": 1.9, "ci_high_us": 2.1, "floor_us": 1.6,
        "half_width_pct": 5.0,
    }  # fmt: skip
    return row | changes


def test_speed_up_has_its_interval_and_leaves_the_baseline_out() -> None:
    frame = pd.DataFrame([a_row(), a_row(label="base", kernel="base", speedup=1.0)])

    figure = charts.speedup_by_layer(frame, "base", STYLES)

    (trace,) = [t for t in figure.data if t.name == "fast"]
    assert list(trace.y) == [1.5]
    assert trace.error_y.array[0] == pytest.approx(0.1)
    assert trace.error_y.arrayminus[0] == pytest.approx(0.1)
    assert trace.marker.color == STYLES["fast"].color
    assert figure.layout.yaxis.type == "log"
    assert "×" in figure.layout.yaxis.title.text
    assert "base" not in [t.name for t in figure.data]


def test_incomparable_result_is_not_drawn() -> None:
    frame = pd.DataFrame([a_row(), a_row(layer="down_proj", is_timed=False)])

    figure = charts.floor_by_layer(frame, STYLES)

    assert sum(len(trace.y) for trace in figure.data) == 1


@pytest.mark.parametrize(("column", "other"), [("backend", "cpu"), ("m", 8), ("cache", "hot")])
def test_incomparable_results_are_never_in_one_chart(column: str, other: Any) -> None:
    frame = pd.DataFrame([a_row(), a_row(**{column: other})])

    with pytest.raises(ValueError, match=f"one {column}"):
        charts.speedup_by_layer(frame, "base", STYLES)


def test_layers_are_sorted_by_size_within_models() -> None:
    frame = pd.DataFrame(
        [
            a_row(model="llama-13b", layer="o_proj"),
            a_row(layer="down_proj", k=128),
            a_row(),
        ]
    )

    figure = charts.floor_by_layer(frame, STYLES)

    assert list(figure.layout.xaxis.ticktext) == ["o_proj", "down_proj", "o_proj"]
    assert [note.text for note in figure.layout.annotations] == ["llama-7b", "llama-13b"]
    assert list(figure.data[0].x) == [2, 1, 0]


def test_kernels_of_a_layer_are_grouped_in_one_order() -> None:
    frame = pd.DataFrame([a_row(), a_row(label="base", kernel="base")])

    base, fast = charts.floor_by_layer(frame, STYLES).data

    assert (base.name, fast.name) == ("base", "fast")
    assert -0.5 < base.x[0] < 0 < fast.x[0] < 0.5


def test_axis_over_decades_shows_whole_numbers() -> None:
    wide = charts.speedup_by_layer(pd.DataFrame([a_row(speedup=0.02)]), "base", STYLES)
    short = charts.speedup_by_layer(pd.DataFrame([a_row()]), "base", STYLES)

    assert {0.02, 0.1, 1.0} <= {round(v, 9) for v in wide.layout.yaxis.tickvals}
    assert short.layout.yaxis.tickvals is None


@pytest.mark.parametrize(("layers", "text"), [(20, "1.50<br>±6.7 %"), (30, "1.50")])
def test_a_map_writes_intervals_where_its_cells_have_room(layers: int, text: str) -> None:
    frame = pd.DataFrame([a_row(layer=f"layer {i}", n=64 + i, one_run=True) for i in range(layers)])

    (drawn,) = speedup_map(frame, "base").data

    assert set(drawn.text[0]) == {text}
    assert all("1.4 to 1.6" in text for text in drawn.customdata[0])
    assert widest_percent(frame) == pytest.approx(100 / 15)


def test_shape_is_placed_at_an_unmeasured_layer_of_its_size() -> None:
    bare = {"model": "", "layer": "", "speedup": 3.0, "one_run": True}
    rows = [
        a_row(one_run=True),
        a_row(**bare),
        a_row(label="other", **bare),
        a_row(label="other", n=96, **bare),
    ]

    (drawn,) = speedup_map(pd.DataFrame(rows), "base").data

    assert list(drawn.x) == ["96×64", "llama-7b o_proj"]
    cells = dict(zip(drawn.y, ([cell[:4] for cell in line] for line in drawn.text), strict=True))
    assert cells == {"fast": ["", "1.50"], "other": ["3.00", "3.00"]}


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ((1.0, 7.0), None),
        ((0.3, 100.0), ["0.1", "0.2", "0.5", "1", "2", "5", "10", "20", "50", "100", "200", "500"]),
        ((), None),
    ],
)
def test_a_wide_log_axis_names_fewer_steps_in_full(
    values: tuple[float, ...], names: list[str] | None
) -> None:
    assert log_axis(values).get("ticktext") == names


def test_axis_of_nearly_equal_values_is_wider_than_their_noise():
    low, high = log_axis([0.3707, 0.3712])["range"]

    assert 10**high / 10**low > 2


def test_outlier_is_named_beyond_the_axis_of_losses():
    changes = {"w8a8": 0.1, "w6a6": 0.9, "w4a16": 2.0, "w4a4": 966.0}
    rows = [
        {"scheme": s, "task": "wikitext", "change": c, "low": 0.9 * c, "high": 1.1 * c}
        for s, c in changes.items()
    ]

    figure = losses(pd.DataFrame(rows), scheme_styles(changes), "%")

    assert figure.layout.yaxis.range[1] < 10
    assert "w4a4 +966" in figure.layout.annotations[0].text
