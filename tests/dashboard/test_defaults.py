"""Defaults of pages: scheduled runs on GPUs, and banners."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_results import COMMIT, a_record, a_run, records_of
from page_content import table, words

from flexq_bench.db.releases import store_releases

LATE = "2025-11-25T10:00:00+00:00"


@pytest.fixture
def three_kinds(store):
    """A scheduled run, and after it a sweep on the same GPU and a run on a CPU."""
    store.add(*records_of(a_run("night", suite="nightly", trigger="nightly")))
    sweep = a_run("sweep", suite="sweep", trigger="sweep", created_at=LATE)
    store.add(a_record(sweep, m=999, created_at=LATE))
    cpu = a_run("cpu", suite="smoke", created_at=LATE)
    store.add(a_record(cpu, backend="cpu", gpu="A CPU", created_at=LATE))
    return store


@pytest.mark.usefixtures("three_kinds")
def test_results_of_scheduled_runs_are_the_default(open_results):
    app = open_results()

    assert set(table(app, of="label")["gpu"]) == {"NVIDIA H200"}
    assert 999 not in set(table(app, of="label")["m"])
    assert set(table(open_results(run=a_run("sweep").uuid[:8]), of="label")["m"]) == {999}


@pytest.mark.usefixtures("three_kinds")
def test_selected_suite_is_shown_wherever_it_ran(open_results):
    assert set(table(open_results(suite="smoke"), of="label")["gpu"]) == {"A CPU"}
    assert set(table(open_results(suite="sweep"), of="label")["m"]) == {999}


def test_a_manual_run_is_shown_where_nothing_is_scheduled(filled, open_results):
    assert len(table(open_results(), of="label")) == 8


@pytest.mark.usefixtures("three_kinds")
def test_overview_lists_scheduled_runs_by_default(open_home):
    assert table(open_home(), of="planned")["suite"].tolist() == ["nightly"]
    assert set(table(open_home(all="on"), of="planned")["suite"]) == {"sweep", "smoke"}


def test_unfinished_run_of_another_suite_is_not_newer(filled, open_results):
    late = a_run("late", suite="smoke", status="interrupted", created_at=LATE, plan=("x", "y"))
    filled.declare(late)

    assert "There is a newer one" not in words(open_results())


def test_a_newer_unfinished_run_of_the_same_suite_is_named(filled, open_results):
    late = a_run("late", status="interrupted", created_at=LATE, plan=("x", "y"))
    filled.declare(late)

    assert "There is a newer one" in words(open_results())


def test_missing_default_is_not_reported_as_requested(filled, open_results):
    other = a_run("other", suite="smoke", created_at=LATE)
    filled.add(a_record(other, created_at=LATE), a_record(other, kernel="abq-w6a6", m=2))
    app = open_results(suite="paper-fig10")
    assert "cublaslt-w8a8" in {box.value for box in app.selectbox}

    (suite,) = [box for box in app.selectbox if box.label == "Suite"]
    app = suite.set_value("smoke").run()

    assert "so ignored" not in words(app)


def test_unknown_baseline_of_the_link_is_named(filled, open_results):
    assert "baseline no-such" in words(open_results(baseline="no-such"))


@pytest.fixture
def beside_another_project(filled):
    """The records, and later ones of another repository: same names and shapes, other times, a
    scheduled run; and what another tool measured."""
    commit = replace(COMMIT, sha="b" * 40, topo_order=500, project="acme")
    night = a_run("theirs", suite="acme", trigger="nightly", created_at=LATE)
    tool = a_run("tool", suite="acme-tool", created_at=LATE)
    theirs = {"commit": commit, "project": "acme", "created_at": LATE, "median_us": 80.0}
    filled.add(
        a_record(night, **theirs),
        a_record(tool, **theirs, backend="outside", kernel="theirs", gpu="Their GPU"),
    )
    return filled


@pytest.mark.usefixtures("beside_another_project")
def test_results_of_other_projects_are_not_among_ours(open_home, open_kernels, open_results):
    scores = table(open_home(), of="last week").set_index("kernel")
    ours = scores.loc["flexq-w6a6"]
    assert "theirs" not in scores.index
    assert "No run was scheduled" not in words(open_home())
    assert ours["cases"] == 4
    assert "80.0" not in words(open_kernels()) + str([f.value for f in open_kernels().dataframe])
    assert set(table(open_results(), of="label")["gpu"]) == {"NVIDIA H200"}
    assert 80.0 not in set(table(open_results(), of="label")["median_us"])
    assert "acme" not in set(table(open_home(), of="planned")["suite"])


def test_a_database_of_one_project_shows_that_project(store, open_home, open_results):
    commit = replace(COMMIT, project="acme")
    store.add(a_record(a_run("theirs"), commit=commit, project="acme", median_us=80.0))

    assert table(open_home(), of="last week")["kernel"].tolist() == ["flexq-w6a6"]
    assert table(open_results(), of="label")["median_us"].tolist() == [80.0]


def test_a_release_is_compared_with_what_is_newer_only(store, open_home):
    for order, at in ((1, "2025-11-01"), (2, "2025-11-20")):
        commit = replace(COMMIT, sha=f"{order}" * 40, topo_order=order)
        created = {"created_at": f"{at}T10:00:00+00:00"}
        run = a_run(at, trigger="nightly", **created)
        store.add(a_record(run, commit=commit, median_us=8.0 + order, **created))
    with store.session() as session:
        store_releases(session, {"v1": "1" * 40})
    (before,) = table(open_home(), of="last week")["release"]
    with store.session() as session:
        store_releases(session, {"v1": "1" * 40, "v2": "2" * 40})

    of_v2 = table(open_home(release="v2"), of="last week")

    assert before == pytest.approx(100 * (10 / 9 - 1), abs=0.005)
    assert "release" not in of_v2.columns  # an empty column is left out
