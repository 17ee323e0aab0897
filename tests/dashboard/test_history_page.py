"""The History page."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from made_results import COMMIT, H200, a_record, a_run, numbers
from page_content import chart, words
from streamlit.testing.v1 import AppTest

from flexq_bench.db.engine import open_database
from flexq_bench.db.records import CommitInfo
from flexq_bench.db.releases import store_releases
from flexq_bench.exchange.external.formats import read_results
from flexq_bench.exchange.external.importing import store_readings
from flexq_bench.exchange.external.records import Origin

EVER = "2025-11-21T10:00:00+00:00"


@pytest.fixture
def stored(store):
    """Five commits, stored in another order than they follow each other; a driver between two."""

    def fill(new):
        for order in (3, 1, 5, 2, 4):
            new.add(*points(order))

    return store.once(fill)


def points(order: int, **changes: Any) -> list[Any]:
    """flexq at M = 1 and 8, and cublas, at a commit."""
    commit = replace(COMMIT, sha=f"{order:02x}" * 20, topo_order=order)
    run = a_run(f"run {order}")
    fields = {
        "commit": commit,
        "environment": {"driver": "1" if order < 4 else "2"},
        "created_at": f"2025-11-2{order}T10:00:00+00:00",
    } | changes
    return [
        a_record(run, m=1, median_us=8.0 + order, **fields),
        a_record(run, m=8, median_us=10.0 + order, **fields),
        a_record(run, m=1, kernel="cublas-fp16", median_us=20.0, **fields),
    ]


def listed_points(app: AppTest) -> Any:
    return app.dataframe[1].value


def patterns(app: AppTest) -> list[tuple[Any, ...]]:
    """Pattern, since and missing nights of each series."""
    table = app.dataframe[0].value
    return [tuple(row)[1:] for row in table.itertuples(index=False)]


def lines(app: AppTest) -> list[Any]:
    return [trace for trace in chart(app)["data"] if trace["mode"] == "lines+markers"]


def test_points_follow_ancestry_not_the_clock_of_storing(stored, open_history):
    table = listed_points(open_history(kernel="flexq-w6a6", m="1"))

    assert table["commit"].str[:2].tolist() == ["01", "02", "03", "04", "05"]
    assert table["time (µs)"].tolist() == [9.0, 10.0, 11.0, 12.0, 13.0]
    assert table["run"].tolist()[0] == f"results?run={a_run('run 1').uuid[:8]}"


def test_filters_in_the_link_choose_the_series(stored, open_history):
    def drawn(**link):
        return sorted({trace["name"].split(" N=")[0] for trace in lines(open_history(**link))})

    assert drawn() == ["cublas-fp16 M=1", "flexq-w6a6 M=1", "flexq-w6a6 M=8"]
    assert drawn(kernel="flexq-w6a6") == ["flexq-w6a6 M=1", "flexq-w6a6 M=8"]
    assert drawn(m="8") == ["flexq-w6a6 M=8"]
    assert drawn(model="llama-7b", layer="o_proj", m="8") == ["flexq-w6a6 M=8"]


def test_a_model_without_the_shape_leaves_the_series_out(stored, open_history):
    stored.add(*points(1, n=5120, k=5120, model="llama-13b"))

    names = {trace["name"] for trace in lines(open_history(model="llama-13b"))}

    assert names
    assert all("N=5120" in name for name in names)


def test_a_filter_chosen_on_the_page_goes_into_the_link(stored, open_history):
    app = open_history()
    kernels = next(widget for widget in app.multiselect if widget.label == "Kernel")

    app = kernels.select("cublas-fp16").run()

    assert app.query_params["kernel"] == "cublas-fp16"
    assert {trace["name"].split()[0] for trace in lines(app)} == {"cublas-fp16"}


def test_percent_of_the_floor_is_asked_for_by_the_link(stored, open_history):
    app = open_history(kernel="flexq-w6a6", m="1", show="% of read")

    table = listed_points(app)
    assert table["floor / time (%)"].tolist() == pytest.approx(
        [100 * 4.0 / median for median in (9, 10, 11, 12, 13)]
    )
    assert (table["low"] < table["floor / time (%)"]).all()
    assert (table["floor / time (%)"] < table["high"]).all()
    assert chart(app)["layout"]["yaxis"]["title"]["text"] == "floor / time (%)"


def tagged(store: Any, **orders: int) -> None:
    with store.session() as session:
        store_releases(session, {name: f"{order:02x}" * 20 for name, order in orders.items()})


def test_relative_to_a_release_every_series_has_100_percent_there(stored, open_history):
    tagged(stored, v1=2, v2=4)

    app = open_history(kernel="flexq-w6a6", m="1", show="relative to a release", release="v1")

    table = listed_points(app)
    assert table["time / time at v1 (%)"].tolist() == pytest.approx([90, 100, 110, 120, 130])
    assert (table["low"] < table["high"]).all()
    assert chart(app)["layout"]["yaxis"]["title"]["text"] == "time / time at v1 (%)"


def test_a_release_is_of_the_project_whose_series_are_drawn(stored, open_history):
    theirs = replace(COMMIT, sha="04" * 20, topo_order=4, project="acme")
    stored.add(a_record(a_run("theirs"), m=1, project="acme", commit=theirs))
    tagged(stored, v1=2, v2=4)

    ours = open_history(kernel="flexq-w6a6", m="1", show="relative to a release", release="v1")
    shown = {"show": "relative to a release", "release": "v1"}
    alone = open_history(kernel="flexq-w6a6", m="1", project="acme", **shown)

    assert len(listed_points(ours)) == 5  # the series of theirs is none of a line of ours
    assert listed_points(alone)["time / time at v2 (%)"].tolist() == pytest.approx([100])


def test_the_newest_release_is_taken_and_linked(stored, open_history):
    tagged(stored, v1=2, v2=4)

    app = open_history(kernel="flexq-w6a6", m="1", show="relative to a release")

    assert app.query_params["release"] == "v2"
    assert 100.0 in listed_points(app)["time / time at v2 (%)"].round(6).tolist()


def test_release_between_measured_commits_has_the_earlier_level(stored, open_history):
    aside = replace(COMMIT, sha="ee" * 20, topo_order=4)
    stored.add(*points(9, n=64, commit=aside))  # the tag's own commit was measured on another shape
    with stored.session() as session:
        store_releases(session, {"v1": aside.sha})
    stored.add(*points(7))

    app = open_history(kernel="flexq-w6a6", m="1", shape="4096x4096", show="relative to a release")

    table = listed_points(app)
    assert (
        dict(zip(table["commit"].str[:2], table["time / time at v1 (%)"].round(6), strict=True))[
            "04"
        ]
        == 100.0
    )


def test_series_younger_than_the_release_say_so(stored, open_history):
    stored.add(a_record(a_run("old"), m=3, commit=replace(COMMIT, sha="00" * 20, topo_order=0)))
    tagged(stored, v0=0)

    app = open_history(kernel="cublas-fp16", show="relative to a release")

    assert "None of these series was measured at v0" in words(app)


def test_without_a_release_it_says_how_to_store_one(stored, open_history):
    app = open_history(show="relative to a release")

    assert "db tags" in words(app)
    assert not app.get("plotly_chart")


def test_a_point_knows_its_measurement(stored, open_history):
    app = open_history(kernel="flexq-w6a6", m="1")

    of_table = [link.partition("uuid=")[2] for link in listed_points(app)["samples"]]
    of_chart = [uuid for trace in lines(app) for uuid in trace["customdata"]]
    assert of_chart == of_table
    assert len(set(of_chart)) == 5


def test_every_value_is_drawn_with_its_interval(stored, open_history):
    app = open_history(kernel="flexq-w6a6", m="1")

    bands = [trace for trace in chart(app)["data"] if trace.get("fill") == "toself"]
    assert [len(numbers(band["x"])) for band in bands] == [
        6,
        4,
    ]  # there and back: three points, then two


def test_epoch_ends_the_line_with_a_dashed_rule(stored, open_history):
    app = open_history(kernel="flexq-w6a6", m="1")

    assert [len(trace["text"]) for trace in lines(app)] == [3, 2]
    (rule,) = chart(app)["layout"]["shapes"]
    assert (rule["x0"], rule["line"]["dash"]) == (2.5, "dash")


def test_long_history_lists_newest_commits_by_default(store, open_history):
    store.add(*(record for order in range(1, 53) for record in points(order, created_at=EVER)))

    app = open_history(kernel="flexq-w6a6")
    listed = listed_points(app)

    assert set(listed["commit"].str[:2]) == {f"{order:02x}" for order in range(3, 53)}
    assert len(listed) == 2 * 50
    assert sum(len(trace["customdata"]) for trace in lines(app)) == 2 * 52  # the chart has all
    assert len(listed_points(app.toggle(key="all-points").set_value(True).run())) == 2 * 52


def test_hovering_tells_run_and_commit(stored, open_history):
    text = lines(open_history(kernel="flexq-w6a6", m="1"))[0]["text"][0]

    assert "commit 0101010101" in text
    assert f"run {a_run('run 1').uuid[:8]}" in text


def test_series_of_a_kernel_share_its_colour(stored, open_history):
    drawn = {
        trace["name"].split(" N=")[0]: (trace["line"]["color"], trace["line"]["dash"])
        for trace in lines(open_history())
    }

    first, second = drawn["flexq-w6a6 M=1"], drawn["flexq-w6a6 M=8"]
    assert first[0] == second[0] != drawn["cublas-fp16 M=1"][0]
    assert first[1] != second[1]


def test_one_point_has_a_bar(store, open_history):
    store.add(a_record())

    app = open_history()
    (trace,) = lines(app)

    median, low, high = (listed_points(app)[name][0] for name in ("time (µs)", "low", "high"))
    assert numbers(trace["error_y"]["array"]) == pytest.approx([high - median])
    assert numbers(trace["error_y"]["arrayminus"]) == pytest.approx([median - low])


def test_rejected_results_explain_an_empty_chart(store, open_history):
    store.add(a_record(status="failed", median_us=None, accepted=False, detail="boom"))

    app = open_history()

    assert "No accepted result" in words(app)
    assert not app.get("plotly_chart")


def test_too_many_series_are_cut_and_it_says_so(store, open_history):
    store.add(*(a_record(m=m) for m in range(1, 15)))

    app = open_history()

    assert len({trace["name"] for trace in lines(app)}) == 6
    assert "6 of 14 series" in words(app)


def test_link_to_a_missing_series_says_so(stored, open_history):
    assert "kernel no-such" in words(open_history(kernel="no-such"))


def test_probes_are_no_kernels_to_follow(stored, open_history):
    stored.add(a_record(kernel="read-6", m=1, floor_us=None, tops=None))

    kernels = next(w for w in open_history().multiselect if w.label == "Kernel")

    assert kernels.options == ["cublas-fp16", "flexq-w6a6"]


def test_one_gpu_is_no_choice(stored, open_history):
    assert H200 in lines(open_history())[0]["name"]
    assert "GPU" not in [widget.label for widget in open_history().multiselect]


def nightly(store: Any, medians: list[float], clocks: list[float], *, left_out: int = -1) -> None:
    """A result a day of November, each at a commit of its own."""
    for day, (median, clock) in enumerate(zip(medians, clocks, strict=True), start=1):
        commit = replace(COMMIT, sha=f"{day:02x}" * 20, topo_order=day)
        created_at = f"2025-11-{day:02}T10:00:00+00:00"
        run = a_run(f"run {day}")
        record = a_record(run, median_us=median, commit=commit, created_at=created_at)
        if day != left_out:
            store.add(replace(record, sm_clock_mhz=clock))


def wobbling(level: float, count: int) -> list[float]:
    return [level * (1 + 0.001 * (-1) ** i) for i in range(count)]


def test_step_names_its_commit_and_missing_nights(store, open_history):
    nightly(store, wobbling(10, 14) + wobbling(11, 14), [1980.0] * 28, left_out=5)

    assert patterns(open_history()) == [("a step", "0f" * 5, 1)]


def test_a_step_that_the_clock_explains_says_so(store, open_history):
    nightly(store, wobbling(10, 14) + wobbling(11, 14), [1980.0] * 14 + [1800.0] * 14)

    ((pattern, since, _),) = patterns(open_history())
    assert (pattern, since) == ("the GPU's clock changed, not the work", "0f" * 5)


def test_patterns_are_those_of_the_newest_epoch_series_by_series(stored, open_history):
    assert {pattern for pattern, _, _ in patterns(open_history())} == {
        "a new environment, too few results since"
    }


def test_too_few_results_are_not_called_steady(store, open_history):
    for order in range(1, 8):
        run = a_run(f"night {order}")
        created_at = f"2025-11-{order:02d}T10:00:00+00:00"
        commit = replace(COMMIT, sha=f"{order:02x}" * 20, topo_order=order)
        step = 1.05 if order > 4 else 1.0
        store.add(a_record(run, commit=commit, created_at=created_at, median_us=8.0 * step))

    ((pattern, _, _),) = patterns(open_history())

    assert "too few results" in pattern
    assert "8 of one epoch" in pattern


def test_imported_answers_are_judged_by_question(store, open_history, tmp_path):
    for number, lost in ((1, 0), (2, 12)):
        at = f"2026-03-0{number}T10-00-00.000000"
        right = [float(place >= lost) for place in range(100)]
        values = {"acc,none": sum(right) / 100, "acc_stderr,none": 0.03}
        content = {
            "results": {"arc": values},
            "configs": {},
            "higher_is_better": {"arc": {"acc": True}},
        }
        (tmp_path / f"results_{at}.json").write_text(json.dumps(content))
        rows = [
            {"doc_id": place, "doc_hash": str(place), "acc": v} for place, v in enumerate(right)
        ]
        (tmp_path / f"samples_arc_{at}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        origin = Origin("acme", CommitInfo(str(number) * 40, None, None, dirty=False))
        readings = read_results("lm-eval", str(tmp_path / f"results_{at}.json"))
        with open_database(str(store.path)) as database:
            store_readings(database, readings, origin, lambda many: {one.sha: one for one in many})

    page = open_history(metric="acc")

    assert "12 of 100 questions worse, 0 better: worse" in words(page)
