"""The Paper page: an overview of all published tables, and a page of each."""

from __future__ import annotations

from made_results import a_record, a_run
from page_content import words

TABLE_6 = {
    "cublas-w8a8[gemmex-sums]": 36.0,
    "flexq-w6a6[vanilla]": 9.5,
    "flexq-w6a6[+warp-reduction]": 6.7,
    "flexq-w6a6[+pipeline]": 5.0,
    "flexq-w6a6[+evict-first]": 4.9,
    "flexq-w6a6[-dequant]": 4.6,
}


def measure(store, times, **fields):
    run = a_run(fields.pop("run", "one"))
    for label, median in times.items():
        name, _, variant = label.removesuffix("]").partition("[")
        shape = {"m": 1, "n": 4096, "k": 4096} | fields
        store.add(a_record(run, kernel=name, variant=variant, median_us=median, **shape))


def test_every_published_table_has_a_verdict_without_results(store, open_paper):
    app = open_paper()

    table = app.dataframe[0].value
    assert len(table) == 42
    assert set(table["kind"]) == {"not here"}
    assert table["verdict"].str.startswith("can't be").all()
    assert "reproduce" in words(app)


def test_page_of_a_table_shows_printed_numbers_beside_ours(store, open_paper):
    measure(store, TABLE_6)

    app = open_paper(table="flexq/table-6")

    shown = app.dataframe[0].value.set_index(["kernel", "metric"])
    row = shown.loc[("flexq-w6a6[+evict-first]", "latency us")]
    assert (row["printed"], row["ours"]) == (15.03, 4.9)
    assert round(row["their_share"]) == 83
    assert {"m", "n", "k", "of"}.isdisjoint(app.dataframe[0].value), (
        "the same in all rows, or empty"
    )
    assert "All of m 1, n 4096, k 4096" in words(app)
    assert "order holds" in words(app)
    assert "45 % of the bandwidth" in words(app)


def test_changed_record_changes_the_page(store, open_paper):
    measure(store, TABLE_6)
    measure(
        store,
        {"flexq-w6a6[vanilla]": 3.0},
        run="two",
        created_at="2026-11-22T10:00:05+00:00",
    )

    app = open_paper(table="flexq/table-6")

    shown = app.dataframe[0].value.set_index(["kernel", "metric"])
    assert shown.loc[("flexq-w6a6[vanilla]", "latency us"), "ours"] == 3.0
    assert "differs" in words(app)


def test_times_of_a_changed_checkout_count_without_others(store, open_paper):
    measure(store, TABLE_6, accepted=False)
    changed = open_paper(table="flexq/table-6")
    measure(store, {**TABLE_6, "flexq-w6a6[vanilla]": 9.6}, run="two")
    app = open_paper(table="flexq/table-6")

    assert "in a checkout with changes" in words(changed)
    assert "checkout with changes" not in words(app)
    shown = app.dataframe[0].value.set_index(["kernel", "metric"])
    assert shown.loc[("flexq-w6a6[vanilla]", "latency us"), "ours"] == 9.6


def test_statements_of_a_paper_are_listed_with_their_caveats(store, open_paper):
    measure(store, TABLE_6)

    app = open_paper(paper="flexq")

    stated = app.dataframe[1].value
    assert set(stated["paper"]) == {"flexq"}
    row = stated[stated["stated"].str.endswith("2.46 x")].iloc[0]
    assert row["kind"] == "order holds"
    assert "1.33x" in row["caveat"]
    assert app.dataframe[1].value.index.get_loc(row.name) < 3, "what is measured comes first"


def test_overview_lists_every_mismatch_of_the_papers(store, open_paper):
    listed = open_paper(paper="atom").dataframe[2].value.set_index("where")

    assert len(listed) == 6
    assert listed.loc["section 5.4", "tables"] == "table-4"


def test_page_of_a_table_shows_what_is_stated(store, open_paper):
    measure(store, TABLE_6)

    about = open_paper(table="flexq/table-6").dataframe[1].value

    assert set(about["where"]) == {"section 5.4, table-6"}
    assert about.set_index("metric").loc["overhead", "kind"] == "differs"


def test_figure_has_a_page_of_its_statements(store, open_paper):
    app = open_paper(table="flexq/figure-10")

    stated = app.dataframe[0].value
    assert {"m = 1", "m = 4", "m = 8"} <= set(stated["of"])
    assert "reproduce flexq/figure-10" in words(app)
