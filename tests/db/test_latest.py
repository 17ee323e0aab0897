from __future__ import annotations

from flexq_bench.db import queries
from flexq_bench.db.queries import Filters
from flexq_bench.db.store import add_record


def at(hour: int, **changes):
    return {"created_at": f"2025-11-21T{hour:02}:00:00+00:00", **changes}


def test_latest_results_are_the_newest_accepted_of_each_series(session, build):
    add_record(session, build.a_record("old", run=build.a_run("1"), median_us=9.0, **at(1)))
    add_record(session, build.a_record("new", run=build.a_run("2"), median_us=8.0, **at(2)))
    rejected = at(3, median_us=1.0, accepted=False)
    add_record(session, build.a_record("bad", run=build.a_run("3"), **rejected))
    add_record(session, build.a_record("other", m=8, run=build.a_run("1"), median_us=7.0, **at(1)))

    found = queries.latest_results(session)

    assert [(row.m, row.median_us) for row in found] == [(1, 8.0), (8, 7.0)]


def test_static_metrics_are_not_times(session, build):
    add_record(session, build.a_record(metric="registers", unit="", gpu="sm_90"))

    assert queries.latest_results(session) == []
    assert queries.gpu_names(session) == ()


def test_series_filters_narrow(session, build):
    for gpu in ("NVIDIA H200", "NVIDIA A100"):
        add_record(session, build.a_record(gpu, run=build.a_run(gpu), gpu=gpu))

    found = queries.latest_results(session, Filters(gpus=("NVIDIA A100",)))

    assert [row.gpu for row in found] == ["NVIDIA A100"]
    assert queries.gpu_names(session) == ("NVIDIA A100", "NVIDIA H200")


def test_results_at_a_commit_exclude_dirty_trees_and_other_suites(session, build):
    for order, median in ((1, 9.0), (2, 8.0)):
        commit = build.a_commit(order)
        record = build.a_record(
            str(order), run=build.a_run(str(order)), commit=commit, median_us=median, **at(order)
        )
        add_record(session, record)
    dirty = build.a_commit(1, dirty=True)
    add_record(
        session, build.a_record("d", run=build.a_run("d"), commit=dirty, median_us=1.0, **at(5))
    )

    sha = build.a_commit(1).sha
    assert [row.median_us for row in queries.results_at_commit(session, sha)] == [9.0]
    other = Filters(suites=("nightly",))
    assert queries.results_at_commit(session, sha, other) == []
