"""The Pareto page."""

from __future__ import annotations

from typing import Any

import pytest
from made_models import GIB, a_decode, a_score, worse
from made_results import numbers
from page_content import charts_by_axis, words
from streamlit.testing.v1 import AppTest

HASHES = {"flexq-w6ax": "1a" * 32, "w4a16": "2b" * 32, "w8a16": "3c" * 32}
INCREASE = "perplexity increase over fp16 (%)"


def judged(scheme: str, by: float, **changes: Any) -> Any:
    return a_score(scheme, **worse(by), content_hash=HASHES[scheme], **changes)


def decoded(scheme: str, token_ms: float, **changes: Any) -> Any:
    of_checkpoint = {"weights": "a folder", "model": "SmolLM2-135M"}
    case = f"{scheme} {changes}"
    return a_decode(
        scheme,
        1,
        token_ms,
        **({"case": case, "content_hash": HASHES[scheme]} | of_checkpoint | changes),
    )


def points(app: AppTest) -> dict[str, Any]:
    """Traces of the chart over memory, by name: both have the same y axis, and it is the last."""
    return {trace["name"]: trace for trace in charts_by_axis(app)[INCREASE]["data"]}


def table(app: AppTest) -> Any:
    (shown,) = app.dataframe
    return shown.value.set_index("scheme")


def test_point_is_a_checkpoint_with_interval_and_time(store, open_pareto):
    store.keep(a_score("fp16"), judged("flexq-w6ax", 0.02), judged("w4a16", 0.10))
    store.keep(decoded("flexq-w6ax", 2.0), decoded("w4a16", 1.0))
    app = open_pareto()
    assert not app.exception
    rows = table(app)
    assert list(rows["increase"]) == pytest.approx([2.0, 10.0])
    assert list(rows["token_ms"]) == [2.0, 1.0]
    assert list(rows["checkpoint"]) == ["1a" * 6, "2b" * 6]
    assert set(rows["speed_of"]) == {"the checkpoint"}
    assert set(rows["missing"]) == {""}
    memory = points(app)
    assert numbers(memory["w4a16 " + "2b" * 6]["y"]) == pytest.approx([10.0])
    assert numbers(memory["w4a16 " + "2b" * 6]["x"]) == [7.0]


def test_kernels_are_preferred_to_the_reference(store, open_pareto):
    scores = [
        a_score("fp16"),
        judged("w8a16", 0.01, through="kernels"),
        judged("w8a16", 0.50, through="reference"),
    ]
    store.keep(*scores)
    store.keep(decoded("w8a16", 2.0))
    row = table(open_pareto()).loc["w8a16"]
    assert (row["through"], row["increase"]) == ("kernels", pytest.approx(1.0))


def test_missing_values_are_named_and_not_drawn(store, open_pareto):
    store.keep(judged("w8a16", 0.01))
    app = open_pareto()
    missing = table(app).loc["w8a16"]["missing"]
    assert missing == "no perplexity of fp16 on the same segments, not decoded"
    assert "Nothing to draw" in words(app)
    assert not app.get("plotly_chart")


def test_speed_of_random_weights_is_called_that(store, open_pareto):
    random = {"weights": "synthetic", "content_hash": None}
    store.keep(a_score("fp16"), judged("w8a16", 0.01))
    store.keep(decoded("w8a16", 2.0, **random), decoded("flexq-w6ax", 3.0, **random))
    app = open_pareto()
    rows = table(app)
    assert set(rows["speed_of"]) == {"random weights"}
    assert rows.loc["flexq-w6ax"]["missing"] == "no perplexity of a checkpoint"
    assert "random weights of the model's shapes" in words(app)
    assert points(app)["w8a16 " + "3c" * 6]["marker"]["symbol"].endswith("-open")


def test_time_is_never_of_another_checkpoint(store, open_pareto):
    store.keep(a_score("fp16"), judged("w8a16", 0.01))
    store.keep(decoded("w8a16", 2.0, content_hash="ff" * 32))
    assert table(open_pareto()).loc["w8a16"]["missing"] == "not decoded"


def test_weights_replace_an_unknown_memory_peak(store, open_pareto):
    store.keep(a_score("fp16"), judged("w8a16", 0.01))
    store.keep(decoded("w8a16", 2.0, peak_memory_bytes=None, weights_bytes=3 * GIB))
    row = table(open_pareto()).loc["w8a16"]
    assert (row["memory_gib"], row["memory_is"]) == (3.0, "weights")
