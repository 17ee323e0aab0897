"""The Accuracy page."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from made_models import FP16_NLL, LAYERS, a_score, worse
from made_results import COMMIT, a_run, numbers
from page_content import charts_by_axis, table, table_rows, words
from streamlit.testing.v1 import AppTest

from flexq_bench.db.releases import store_releases


@pytest.fixture
def evaluated(store: Any) -> Any:
    """fp16, and two schemes that are 3 % and 40 % worse; piqa; errors of three layers."""
    right, wrong = (1.0,) * 60 + (0.0,) * 40, (1.0,) * 40 + (0.0,) * 60
    piqa = {"task": "piqa", "direction": "higher", "n_items": 100}
    return store.keep(
        a_score("fp16"),
        a_score("flexq-w6ax", **worse(0.03)),
        a_score("w4a4", **worse(0.4)),
        a_score("fp16", "acc", values=right, value=0.6, **piqa),
        a_score("w4a4", "acc", values=wrong, value=0.4, **piqa),
        a_score("w4a4", "layer_error", values=(0.3, 0.1, 0.01), value=0.3,
                parameters={"layers": LAYERS}),
    )  # fmt: skip


def points(chart: dict[str, Any]) -> dict[str, list[float]]:
    return {t["name"]: numbers(t["y"]) for t in chart["data"]}


def scores(app: AppTest) -> list[dict[str, Any]]:
    return table_rows(app, of="items")


def test_perplexities_are_shown_against_fp16_with_intervals(evaluated, open_accuracy):
    chart = charts_by_axis(open_accuracy())["perplexity against fp16 (%)"]

    assert points(chart) == {"flexq-w6ax": [pytest.approx(3.0)], "w4a4": [pytest.approx(40.0)]}
    assert all("error_y" in trace for trace in chart["data"])


def test_tasks_are_shown_against_fp16_in_points(evaluated, open_accuracy):
    app = open_accuracy()
    chart = charts_by_axis(app)["right answers against fp16 (points)"]

    (trace,) = chart["data"]
    assert numbers(trace["y"]) == [pytest.approx(-20.0)]
    assert numbers(trace["error_y"]["array"])[0] > 1
    (row,) = [r for r in scores(app) if (r["scheme"], r["metric"]) == ("w4a4", "acc")]
    assert row["p"] < 1e-4
    assert row["against fp16"].startswith("-20.00 points (-")


def test_each_scheme_has_one_row_with_its_tasks(evaluated, open_accuracy):
    shown = table(open_accuracy(), of="wikitext perplexity").set_index("scheme")

    assert shown.index.tolist() == ["fp16", "flexq-w6ax", "w4a4"]
    assert shown.loc["w4a4", "piqa acc"] == 0.4
    assert shown.loc["w4a4", "piqa acc against fp16"].startswith("-20.00 points (-")
    assert shown.loc["flexq-w6ax", "wikitext perplexity against fp16"].startswith("+3.00 % (")


def test_one_task_on_two_data_has_two_columns(store, open_accuracy):
    store.keep(a_score("fp16"), a_score("fp16", run=a_run("b"), data_hash="0f" * 32, value=9.0))

    (row,) = table_rows(open_accuracy(), of="wikitext perplexity (0f0f0f0f)")

    assert row["wikitext perplexity (0f0f0f0f)"] == 9.0
    assert row["wikitext perplexity (cdcdcdcd)"] != 9.0


def test_a_difference_within_its_interval_is_called_that(store, open_accuracy):
    noisy = tuple(v + d for v, d in zip(FP16_NLL, (0.1, -0.1, 0.05, -0.06, 0.02), strict=True))
    store.keep(a_score("fp16"), a_score("w6a8", values=noisy))

    (row,) = [r for r in scores(open_accuracy()) if r["scheme"] == "w6a8"]

    assert row["against fp16"].endswith("within noise")


def test_output_errors_are_grouped_by_kind_of_layer(evaluated, open_accuracy):
    chart = charts_by_axis(open_accuracy())["relative squared output error (1, log scale)"]

    (trace,) = chart["data"]
    assert numbers(trace["y"]) == pytest.approx([0.2, 0.01])
    assert chart["layout"]["xaxis"]["ticktext"] == ["down_proj", "q_proj"]
    assert numbers(trace["error_y"]["array"])[0] == pytest.approx(0.1)


def test_the_history_names_releases(evaluated, open_accuracy):
    later = replace(COMMIT, sha="d" * 40, topo_order=9)
    run = a_run("later", suite="accuracy")
    evaluated.keep(a_score("fp16", run=run, commit=later),
         a_score("flexq-w6ax", run=run, commit=later, **worse(0.05)))  # fmt: skip
    with evaluated.session() as session:
        store_releases(session, {"v1.0": COMMIT.sha})

    chart = charts_by_axis(open_accuracy())["perplexity on wikitext against fp16 (%)"]

    assert chart["layout"]["xaxis"]["ticktext"] == ["v1.0", "dddddddddd"]
    assert points(chart)["flexq-w6ax"] == pytest.approx([3.0, 5.0])
    assert points(chart)["w4a4"] == pytest.approx([40.0])


def test_the_newest_evaluation_counts(evaluated, open_accuracy):
    later = replace(COMMIT, sha="d" * 40, topo_order=9)
    run = a_run("later", suite="accuracy")
    evaluated.keep(a_score("w4a4", run=run, commit=later, **worse(0.2)))

    chart = charts_by_axis(open_accuracy())["perplexity against fp16 (%)"]

    assert points(chart)["w4a4"] == [pytest.approx(20.0)]


def test_without_fp16_it_says_what_is_missing(store, open_accuracy):
    store.keep(a_score("w4a4"))

    app = open_accuracy()

    assert "was never evaluated unquantized" in words(app)
    assert len(scores(app)) == 1


def test_one_score_alone_says_what_to_add(store, open_accuracy):
    store.keep(a_score("fp16"))

    assert "add schemes" in words(open_accuracy())


def test_failed_evaluation_is_shown(evaluated, open_accuracy):
    evaluated.keep(a_score("abq-w2a8", value=None, values=(), standard_error=None,
                            status="failed", detail="the loss is not finite"))  # fmt: skip

    app = open_accuracy()

    assert "1 of 7 evaluations failed" in words(app)
    assert "the loss is not finite" in {row["why"] for row in scores(app)}


def test_models_are_chosen_by_the_link(evaluated, open_accuracy):
    evaluated.keep(a_score("fp16", model="tiny-llama"))

    assert len(scores(open_accuracy(model="tiny-llama"))) == 1
    assert "Not stored, so ignored: model nothing" in words(open_accuracy(model="nothing"))


def test_shown_change_equals_the_difference_of_shown_values(store, open_accuracy):
    # A scheme on a part of the text, and later the model as it is on all of it.
    part = a_run("part", suite="accuracy")
    late = {"created_at": "2025-11-22T10:00:05+00:00", "n_items": 302956}
    whole = a_run("whole", suite="accuracy", created_at="2025-11-22T10:00:00+00:00")
    store.keep(
        a_score("fp16", run=part, n_items=20470),
        a_score("w4a4", run=part, n_items=20470, **worse(0.10)),
        a_score("fp16", run=whole, values=tuple(v + 0.3 for v in FP16_NLL) * 2, **late),
    )

    row = next(row for row in scores(open_accuracy()) if row["scheme"] == "w4a4")

    base = row["fp16 on the same items"]
    assert row["against fp16"].startswith(f"{100 * (row['value'] / base - 1):+.2f} %")
    assert base == pytest.approx(math.exp(sum(FP16_NLL) / len(FP16_NLL)))
