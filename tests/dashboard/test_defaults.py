"""What pages show where nobody asked for anything: scheduled runs on GPUs, and true banners."""

from __future__ import annotations

import pytest
from made_results import a_record, a_run, records_of
from page_content import table, words

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
def test_results_are_those_of_the_scheduled_run_until_others_are_asked_for(open_results):
    app = open_results()

    assert set(table(app, of="label")["gpu"]) == {"NVIDIA H200"}
    assert 999 not in set(table(app, of="label")["m"])
    assert set(table(open_results(run=a_run("sweep").uuid[:8]), of="label")["m"]) == {999}


@pytest.mark.usefixtures("three_kinds")
def test_a_suite_that_is_asked_for_is_shown_wherever_it_ran(open_results):
    assert set(table(open_results(suite="smoke"), of="label")["gpu"]) == {"A CPU"}
    assert set(table(open_results(suite="sweep"), of="label")["m"]) == {999}


def test_a_manual_run_is_shown_where_nothing_is_scheduled(filled, open_results):
    assert len(table(open_results(), of="label")) == 8


@pytest.mark.usefixtures("three_kinds")
def test_overview_lists_scheduled_runs_until_others_are_asked_for(open_overview):
    assert table(open_overview(), of="planned")["suite"].tolist() == ["nightly"]
    assert set(table(open_overview(all="on"), of="planned")["suite"]) == {"sweep", "smoke"}


def test_an_unfinished_run_of_another_suite_is_no_newer_one_of_these(filled, open_results):
    late = a_run("late", suite="smoke", status="interrupted", created_at=LATE, plan=("x", "y"))
    filled.declare(late)

    assert "There is a newer one" not in words(open_results())


def test_a_newer_unfinished_run_of_the_same_suite_is_named(filled, open_results):
    late = a_run("late", status="interrupted", created_at=LATE, plan=("x", "y"))
    filled.declare(late)

    assert "There is a newer one" in words(open_results())


def test_a_default_that_is_gone_was_not_asked_for(filled, open_results):
    other = a_run("other", suite="smoke", created_at=LATE)
    filled.add(a_record(other, created_at=LATE), a_record(other, kernel="abq-w6a6", m=2))
    app = open_results(suite="paper-fig10")
    assert "cublaslt-w8a8" in {box.value for box in app.selectbox}

    (suite,) = [box for box in app.selectbox if box.label == "Suite"]
    app = suite.set_value("smoke").run()

    assert "not asked for" not in words(app)


def test_a_baseline_that_the_link_names_in_vain_is_named(filled, open_results):
    assert "baseline no-such" in words(open_results(baseline="no-such"))
