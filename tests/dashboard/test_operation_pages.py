"""Pages of operations other than linear layers, and of benchmarks without a shape."""

from __future__ import annotations

import pytest
from made_results import a_record, a_run, attention, of_another_tool
from page_content import chart, table_rows, words


@pytest.fixture
def results(store):
    """Two kernels of attention at two contexts, and one linear layer."""
    for context, median in ((1024, 8.0), (8192, 50.0)):
        store.add(attention(context, median_us=median), attention(context, "slow", median_us=99.0))
    store.add(a_record())
    return store


def test_leaderboard_ranks_kernels_of_an_operation(results, open_page):
    app = open_page("leaderboard", operation="attention_decode", p_context="8192")

    rows = table_rows(app, of="rank")
    assert [(row["label"], row["median_us"]) for row in rows] == [("sdpa", 50.0), ("slow", 99.0)]
    assert "attention_decode" in words(app)
    assert "M =" not in words(app)
    assert "operation=attention_decode" in rows[0]["history"]


def test_kernels_page_draws_times_over_an_axis(results, open_kernels):
    app = open_kernels(operation="attention_decode")

    lines = {line["name"]: line for line in chart(app)["data"]}
    assert lines["sdpa"]["x"] == [1024, 8192]
    assert lines["sdpa"]["y"] == [8.0, 50.0]
    assert {row["parameters"] for row in table_rows(app, of="parameters")} == {
        f"batch=1 context={context} heads=32" for context in (1024, 8192)
    }


def test_linear_pages_leave_other_operations_out(results, open_kernels):
    (point,) = [t for t in chart(open_kernels())["data"] if t["name"] == "flexq-w6a6"]

    assert len(point["x"]) == 1


def test_history_and_results_name_an_operations_parameters(results, open_page):
    history = open_page("history", operation="attention_decode")
    shown = open_page("results")

    names = {row["series"] for row in table_rows(history, of="epoch")}
    assert any("attention_decode batch=1 context=1024 heads=32" in name for name in names)
    assert not any("M=" in name for name in names)
    by_kernel = {row["label"]: row for row in table_rows(shown, of="parameters")}
    assert by_kernel["sdpa"]["operation"] == "attention_decode"


def test_benchmark_without_a_shape_shows_none(store, open_page):
    store.add(a_record(a_run("theirs"), **of_another_tool()))

    names = [row["series"] for row in table_rows(open_page("history"), of="epoch")]

    assert names
    assert not any("M=" in name or "=1" in name for name in names)
