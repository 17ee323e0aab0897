"""The Paper page, and the measured values next to published ones."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from made_results import a_record, a_run
from page_content import words
from streamlit.testing.v1 import AppTest

from flexq_bench.dashboard.views.paper.measured import measured_values
from flexq_bench.db.engine import open_database
from flexq_bench.db.queries import DecodeRow, ScoreRow
from flexq_bench.db.reference_store import ReferenceInfo
from flexq_bench.results.published_numbers import store_published_numbers

AT = datetime(2026, 1, 1, tzinfo=UTC)
RATIO = {"source": "Paper", "source_table": "Table 1", "value": 2.0, "unit": "×"}


@pytest.fixture
def published(store):
    """A database that knows what papers state."""
    with open_database(str(store.path)) as database:
        store_published_numbers(database)
    return store


def paper_table(app: AppTest) -> Any:
    return app.dataframe[0].value


def layers(run: Any, **medians: float) -> list[Any]:
    """o_proj of LLaMA-7B at M = 4, by kernel with underscores for dashes."""
    return [
        a_record(run, kernel=name.replace("_", "-"), m=4, median_us=median)
        for name, median in medians.items()
    ]


def test_a_database_without_published_numbers_says_how_to_get_them(store, open_paper):
    app = open_paper()

    assert "db upgrade" in words(app)
    assert "Table B.1" in str(app.dataframe[0].value["table"].tolist())


def test_published_numbers_are_shown_without_measured_ones(published, open_paper):
    app = open_paper()

    table = paper_table(app)
    assert table["ours"].isna().all()
    assert "run paper-fig10" in words(app)
    figure10 = table[table["table"].str.startswith("Figure 10")]
    assert sorted(figure10["published"]) == [1.24, 1.24, 1.27, 1.78, 1.81, 1.82]


def test_measured_ratio_has_an_interval_and_its_runs(published, open_paper):
    published.add(*layers(a_run("one"), flexq_w6a6=8.0))
    published.add(*layers(a_run("two"), abq_w6a6=12.0))

    (row,) = paper_table(open_paper(measured="on"))[lambda t: t["m"] == "4"].to_dict("records")

    assert (row["published"], row["baseline"], row["hardware"]) == (1.24, "abq-w6a6", "RTX 3090 Ti")
    assert row["ours"] == pytest.approx(1.5)
    assert row["ours_low"] < 1.5 < row["ours_high"]
    assert (row["gpu"], row["cases"], row["apart"]) == ("NVIDIA H200", 1, 1)
    assert "W6A8" in row["differences"]


def test_published_and_measured_numbers_are_two_traces(published, open_paper):
    published.add(*layers(a_run(), flexq_w6a6=8.0, abq_w6a6=12.0))

    figure = json.loads(open_paper().get("plotly_chart")[0].proto.spec)

    theirs, ours = figure["data"]
    assert (theirs["name"], ours["name"]) == ("published", "ours")
    assert "error_x" not in theirs
    assert ours["x"] == pytest.approx([1.5])
    assert ours["error_x"]["array"][0] > 0


def test_the_link_narrows_by_paper(published, open_paper):
    app = open_paper(paper="DGQ, arXiv:2310.04836")

    assert set(paper_table(app)["source"]) == {"DGQ, arXiv:2310.04836"}
    assert "no-such" in words(open_paper(paper="no-such"))


def test_absent_table_is_listed_with_its_reason(published, open_paper):
    absent = open_paper().dataframe[1].value

    assert {"Table 6", "Table B.1", "Tables 4, 12 and 13"} <= set(absent["table"])
    assert absent["why"].str.len().min() > 10


@pytest.mark.parametrize(("bound", "expected"), [("", 3.0**0.5 * 1.0), ("up to", 3.0)])
def test_means_and_best_cases_are_compared_separately(bound, expected):
    stated = ReferenceInfo(
        kernel="flexq-w6ax", baseline="fp16", metric="decode-speedup", bound=bound, **RATIO
    )
    rows = [
        a_decode(scheme, batch, token_ms)
        for scheme, batch, token_ms in (
            ("fp16", 1, 30.0), ("flexq-w6ax", 1, 10.0), ("fp16", 8, 10.0), ("flexq-w6ax", 8, 10.0),
        )
    ]  # fmt: skip

    (ours,) = measured_values(stated, [], [], rows)

    assert ours.value.estimate == pytest.approx(expected)
    assert ours.cases == 2
    assert ours.value.low < ours.value.estimate < ours.value.high


def test_a_ratio_of_memories_is_of_bytes(store):
    stated = ReferenceInfo(kernel="flexq-w6ax", baseline="fp16", metric="memory-ratio", **RATIO)
    rows = [a_decode("fp16", 1, 1.0, memory=24), a_decode("flexq-w6ax", 1, 1.0, memory=10)]

    (ours,) = measured_values(stated, [], [], rows)

    assert ours.value.estimate == pytest.approx(2.4)


def test_a_perplexity_has_the_interval_of_its_standard_error():
    stated = ReferenceInfo(
        source="Paper", source_table="Table 1", kernel="atom-w4a4", metric="perplexity",
        value=11.0, unit="", model="opt-6.7b", task="wikitext",
    )  # fmt: skip

    (ours,) = measured_values(stated, [], [a_score("atom-w4a4", 11.5, 0.1)], [])

    assert (ours.value.low, ours.value.high) == pytest.approx((11.304, 11.696), abs=1e-3)
    assert measured_values(stated, [], [a_score("fp16", 10.0, 0.1)], []) == []


def test_an_increase_is_over_the_baseline_of_the_same_model():
    stated = ReferenceInfo(
        source="Paper", source_table="abstract", kernel="flexq-w6ax", metric="perplexity-increase",
        value=0.05, unit="", baseline="fp16", task="wikitext", bound="at most",
    )  # fmt: skip
    scores = [a_score("fp16", 10.0, 0.3), a_score("flexq-w6ax", 10.2, 0.4)]

    (ours,) = measured_values(stated, [], scores, [])

    assert ours.value.estimate == pytest.approx(0.2)
    assert ours.value.high - ours.value.estimate == pytest.approx(1.96 * 0.5, abs=1e-3)


def a_decode(scheme: str, batch: int, token_ms: float, memory: int | None = None) -> DecodeRow:
    ends = (0.99 * token_ms, 1.01 * token_ms)
    return DecodeRow(
        "llama-13b", "synthetic", scheme, 16, batch, 15, 128, "ok", "", token_ms, token_ms, *ends,
        token_ms, 1000 * batch / token_ms, None, memory, "H200", "r", AT,
    )  # fmt: skip


def a_score(scheme: str, value: float, error: float) -> ScoreRow:
    return ScoreRow(
        *("opt-6.7b", scheme, "reference", "wikitext", "perplexity", value, error, "H200", "r", AT)
    )


def test_measured_numbers_are_shown_with_their_counts(published, open_paper):
    published.add(*layers(a_run(), flexq_w6a6=8.0, abq_w6a6=12.0))

    table = paper_table(open_paper())

    assert list(table.columns).index("ours") < 10
    row = table[table["ours"].notna()].iloc[0]
    assert table.index.get_loc(row.name) == 0, "what is measured comes first"
    assert (row["cases"], row["of"]) == (1, 20)
    assert "1 of 20 layers" in row["caveats"]


def test_a_baseline_far_from_its_floor_is_no_baseline(published, open_paper):
    slow = a_record(kernel="abq-w6a6", m=4, median_us=65.0, floor_us=11.0)
    published.add(a_record(m=4, median_us=8.0), slow)

    rows = paper_table(open_paper())
    row = rows[(rows["m"] == "4") & (rows["baseline"] == "abq-w6a6")].iloc[0]

    assert row["ours"] != row["ours"], "nothing is set beside the published number"
    assert "17 % of its floor" in row["caveats"]


def test_shipped_kernel_is_shown_with_the_published_kernel(published, open_paper):
    published.add(*layers(a_run(), flexq_w6a6=8.0, abq_w6a6=12.0, flexq=6.0))

    rows = paper_table(open_paper(measured="on"))
    ours = rows[rows["m"] == "4"].set_index("our_kernel")["ours"]

    assert ours.to_dict() == {"flexq-w6a6": pytest.approx(1.5), "flexq": pytest.approx(2.0)}


def test_a_ratio_is_of_one_run_before_it_is_of_two(published, open_paper):
    later = {"created_at": "2025-11-22T10:00:05+00:00", "m": 4}
    published.add(*layers(a_run("one"), flexq_w6a6=8.0, abq_w6a6=12.0))
    published.add(a_record(a_run("later"), kernel="abq-w6a6", median_us=9.0, **later))

    (row,) = paper_table(open_paper(measured="on"))[lambda t: t["m"] == "4"].to_dict("records")

    assert row["ours"] == pytest.approx(1.5)
    assert row["apart"] == 0
