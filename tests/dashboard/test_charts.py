"""Charts as functions: a frame in, a figure out."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from dashboard import charts
from dashboard.colors import kernel_styles
from dashboard.frame import COLUMNS

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


def test_a_result_that_may_not_be_compared_is_not_drawn() -> None:
    frame = pd.DataFrame([a_row(), a_row(layer="down_proj", is_timed=False)])

    figure = charts.floor_by_layer(frame, STYLES)

    assert sum(len(trace.y) for trace in figure.data) == 1


@pytest.mark.parametrize(("column", "other"), [("backend", "cpu"), ("m", 8), ("cache", "hot")])
def test_what_may_not_be_compared_is_never_in_one_chart(column: str, other: Any) -> None:
    frame = pd.DataFrame([a_row(), a_row(**{column: other})])

    with pytest.raises(ValueError, match=f"one {column}"):
        charts.speedup_by_layer(frame, "base", STYLES)
