from __future__ import annotations

import dataclasses
import random
from datetime import UTC, datetime

import pytest

from flexq_bench.db import queries
from flexq_bench.db.errors import AmbiguousError, NotFoundError
from flexq_bench.db.queries import Filters
from flexq_bench.db.releases import store_releases
from flexq_bench.db.store import add_record, begin_run, finish_run


def only_series(session):
    (series,) = queries.list_series(session)
    return series.id


def test_history_is_ordered_by_ancestry_not_by_clock(session, build, add):
    for order, hour in ((3, 1), (1, 3), (2, 2)):
        add(
            f"at {order}",
            commit=build.a_commit(order, committed_at=f"2025-11-0{9 - order}T00:00:00+00:00"),
            created_at=f"2025-11-21T0{hour}:00:00+00:00",
            median_us=float(order),
        )

    points = queries.series_history(session, only_series(session))

    assert [p.topo_order for p in points] == [1, 2, 3]
    assert [p.median_us for p in points] == [1.0, 2.0, 3.0]


def test_history_has_accepted_results_and_commits_without_order_last(session, build, add):
    wheel = build.a_commit(None, sha="pkg-1.0.0-abc")
    add("wheel", commit=wheel)
    add("tree", commit=build.a_commit(5))
    dirty = build.a_commit(5, dirty=True)
    add("dirty", commit=dirty, accepted=False)

    points = queries.series_history(session, only_series(session))

    assert [p.commit for p in points] == [build.a_commit(5).sha, "pkg-1.0.0-abc"]


def test_newest_histories_do_not_read_older_results(session, build, add):
    for order in range(1, 41):
        commit = build.a_commit(order)
        add(f"all {order}", commit=commit, median_us=float(order))
        if order % 5 == 0 or order > 38:
            add(f"some {order}", commit=commit, m=8, median_us=float(order))
    ids = [series.id for series in queries.list_series(session)]
    whole = queries.series_histories(session, ids)

    newest = queries.newest_histories(session, ids, commits=3)
    earlier = queries.newest_histories(session, ids, commits=3, until=20)

    for series in ids:
        assert newest[series] == whole[series][-len(newest[series]) :]
        assert 3 <= len(newest[series]) <= 6
        before = [point.topo_order for point in earlier[series] if point.topo_order <= 20]
        assert 3 <= len(before) <= 6
        assert earlier[series][-1] == whole[series][-1]
    assert queries.newest_histories(session, ids, commits=40) == whole


@pytest.mark.parametrize("order", ["on one host", "on two hosts by turns", "backfilled"])
def test_timed_histories_end_as_whole_histories(session, build, add, order, monkeypatch):
    monkeypatch.setattr("flexq_bench.db.queries.series._TIMED_COMMITS", 6)
    places = list(range(1, 31))
    if order == "backfilled":
        random.Random(0).shuffle(places)
        add(commit=build.a_commit(None, sha="pkg-1.0.0-abc"))
    for place in places:
        host = place % 2 if order == "on two hosts by turns" else 0
        environment = {"host": f"h{host}"}
        commit, trigger = build.a_commit(place), "sweep" if place % 11 == 0 else "nightly"
        for again in range(1 + (place % 7 == 0)):
            run = build.a_run(f"{place} {again}", trigger=trigger)
            add(run=run, commit=commit, median_us=float(place), environment=environment)
    [series] = [one.id for one in queries.list_series(session)]
    whole = [
        point
        for point in queries.series_histories(session, [series], without_sweeps=True)[series]
        if point.topo_order is not None
    ]

    timed = queries.timed_histories(session, [series])[series]

    assert [(one.commit, one.topo_order, one.median_us) for one in timed] == [
        (one.commit, one.topo_order, one.median_us) for one in whole[-len(timed) :]
    ]
    assert sum(one.epoch == timed[-1].epoch for one in timed) > 3
    assert len(timed) < len(whole)


def test_missing_cases_are_planned_and_not_received_in_plan_order(session, build, add):
    run = build.a_run(plan=("c", "b", "a"))
    begin_run(session, run, build.a_commit())
    add(run=run, case="b", status="failed", median_us=None)
    add(run=run, case="not planned")

    assert queries.missing_cases(session, run.uuid) == ("c", "a")


def test_runs_are_newest_first_with_their_progress(session, build, add):
    old = build.a_run("old", created_at="2025-11-20T00:00:00+00:00", suite="nightly")
    new = build.a_run("new", status="running", plan=("a", "b", "c"))
    add(run=old, gpu="NVIDIA A100")
    begin_run(session, new, build.a_commit(2))
    add(run=new, case="a", status="noisy")
    add(run=new, case="b")

    first, second = queries.runs(session)

    assert (first.uuid, second.uuid) == (new.uuid, old.uuid)
    assert (first.planned, first.received, first.missing) == (3, 2, 1)
    assert first.statuses == {"noisy": 1, "ok": 1}
    assert (first.gpus, second.gpus) == (("NVIDIA H200",), ("NVIDIA A100",))
    assert (first.commit, first.status, first.finished_at) == (
        build.a_commit(2).sha, "running", None,
    )  # fmt: skip
    assert first.created_at == datetime(2025, 11, 21, 10, tzinfo=UTC)


def test_runs_are_filtered_by_suite_status_gpu_and_limit(session, build, add):
    for name, suite, status, gpu in (
        ("one", "smoke", "complete", "NVIDIA H200"),
        ("two", "nightly", "complete", "NVIDIA A100"),
        ("three", "smoke", "failed", "NVIDIA A100"),
    ):
        run = build.a_run(name, suite=suite, status=status)
        add(run=run, gpu=gpu)

    def uuids(**options):
        return {run.uuid for run in queries.runs(session, **options)}

    one, two, three = (build.a_run(name).uuid for name in ("one", "two", "three"))
    assert uuids(suite="smoke") == {one, three}
    assert uuids(status="failed") == {three}
    assert uuids(gpu="NVIDIA A100") == {two, three}
    assert len(uuids(limit=2)) == 2


def test_run_is_found_by_a_unique_prefix(session, build):
    for uuid in ("abc-1", "abc-12", "b%d"):
        begin_run(session, build.a_run(uuid=uuid, idempotency_key=uuid), build.a_commit())

    assert queries.run_by_uuid_prefix(session, "b").uuid == "b%d"
    assert queries.run_by_uuid_prefix(session, "abc-1").uuid == "abc-1"  # the whole uuid
    with pytest.raises(AmbiguousError, match=r"several runs begin with 'abc': abc-1.*write more"):
        queries.run_by_uuid_prefix(session, "abc")
    with pytest.raises(NotFoundError, match="no run begins with ''"):
        queries.run_by_uuid_prefix(session, "")
    with pytest.raises(NotFoundError, match="no run begins with '%'"):
        queries.run_by_uuid_prefix(session, "%")


def test_latest_complete_run_skips_runs_with_missing_cases(session, build, add):
    def a_run(name, hour, gpu, **changes):
        run = build.a_run(name, created_at=f"2025-11-21T0{hour}:00:00+00:00", **changes)
        add(run=run, gpu=gpu, case="a")
        return run

    a_run("old", 1, "NVIDIA H200")
    new = a_run("new", 2, "NVIDIA H200")
    a_run("stopped", 3, "NVIDIA H200", status="interrupted", plan=("a", "b"))
    # Its file was written before the run ended, and yet nothing is missing.
    full = a_run("full", 1, "NVIDIA A100", status="running", plan=("a",))
    a_run("no plan", 2, "NVIDIA A100", status="running")

    latest = queries.latest_runs(session, complete=True)

    assert {gpu: run.uuid for gpu, run in latest.items()} == {
        "NVIDIA H200": new.uuid,
        "NVIDIA A100": full.uuid,
    }
    assert queries.latest_runs(session, complete=True, suite="nightly") == {}


def test_repeated_case_counts_once_with_its_last_result(session, build, add):
    run = build.a_run()
    hours = {"third": "12", "second": "11", "first": "10"}
    for name, hour in hours.items():
        status = "ok" if name == "third" else "noisy"
        created_at = f"2025-11-21T{hour}:00:00+00:00"
        add(name, run=run, status=status, detail=name, created_at=created_at)

    assert [row.detail for row in queries.run_results(session, run.uuid)] == ["third"]
    assert queries.runs(session)[0].statuses == {"ok": 1}
    assert len(list(queries.run_records(session, run.uuid))) == 3


def test_result_row_says_what_the_record_says(session, build, add):
    record = add(commit=build.a_commit(4, dirty=True), accepted=False)

    (row,) = queries.run_results(session, record.run.uuid)

    same = {f.name for f in dataclasses.fields(row)} & {f.name for f in dataclasses.fields(record)}
    differing = {"run", "commit", "created_at"}
    assert len(same) > 30
    assert {n: getattr(row, n) for n in same - differing} == {
        n: getattr(record, n) for n in same - differing
    }
    assert (row.run, row.commit, row.dirty) == (record.run.uuid, record.commit.sha, True)
    assert row.created_at.isoformat() == record.created_at
    assert row.suite == "smoke"


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        (Filters(), {"plain", "other", "bad"}),
        (Filters(kernels=("abq-w6a6", "nope")), {"other"}),
        (Filters(gpus=("NVIDIA A100",)), {"other"}),
        (Filters(models=("opt-6.7b",)), {"other"}),
        (Filters(layers=("fc1",)), {"other"}),
        (Filters(stages=("linear",)), {"other"}),
        (Filters(caches=("hot",)), {"other"}),
        (Filters(suites=("nightly",)), {"other"}),
        (Filters(m=(8,)), {"other"}),
        (Filters(statuses=("incorrect",)), {"bad"}),
        (Filters(accepted_only=True), {"plain", "other"}),
        (Filters(since=datetime(2025, 11, 22, tzinfo=UTC)), {"bad"}),
        (Filters(kernels=("flexq-w6a6",), statuses=("ok",)), {"plain"}),
    ],
)
def test_results_table_applies_each_filter(session, build, add, filters, names):
    add(detail="plain")
    nightly = build.a_run("nightly", suite="nightly")
    add(
        detail="other",
        kernel="abq-w6a6",
        gpu="NVIDIA A100",
        model="opt-6.7b",
        layer="fc1",
        stage="linear",
        cache="hot",
        m=8,
        run=nightly,
    )
    add(
        "bad",
        detail="bad",
        case="bad",
        status="incorrect",
        accepted=False,
        created_at="2025-11-22T00:00:00+00:00",
    )

    assert {row.detail for row in queries.results_table(session, filters)} == names


def test_series_are_listed_with_the_number_of_matching_results(session, add):
    for name in ("one", "two"):
        add(name, group=None)
    add("dirty", group=None, accepted=False)
    add(kernel="abq-w6a6", gpu="NVIDIA A100")

    abq, flexq = queries.list_series(session)
    assert (abq.kernel, abq.measurements, flexq.kernel, flexq.measurements) == (
        "abq-w6a6", 1, "flexq-w6a6", 3,
    )  # fmt: skip
    assert (flexq.group, flexq.m, flexq.direction) == (None, 1, "lower")
    (accepted,) = queries.list_series(session, Filters(gpus=("NVIDIA H200",), accepted_only=True))
    assert accepted.measurements == 2


def test_filter_values_are_those_that_occur(session, add):
    add(model="", layer="")
    add(kernel="abq-w6a6", m=8)

    values = queries.filter_values(session)

    assert values.kernels == ("abq-w6a6", "flexq-w6a6")
    assert (values.models, values.layers, values.m) == (("llama-7b",), ("o_proj",), (1, 8))
    assert (values.suites, values.statuses) == (("smoke",), ("ok",))


def test_kernel_names_are_distinct_without_variants(session, add):
    for kernel, variant in (("flexq-w6a6", ""), ("flexq-w6a6", "vanilla"), ("abq-w6a6", "")):
        add(kernel=kernel, variant=variant, case=f"{kernel}[{variant}]")

    assert queries.kernel_names(session) == ("abq-w6a6", "flexq-w6a6")


def test_samples_are_returned_by_placement(session, build):
    timed = build.a_record("timed", samples_us=((0.1, 0.2), (), (0.3,)))
    untimed = build.a_record("untimed", status="failed", median_us=None, samples_us=())
    for record in (timed, untimed):
        add_record(session, record)

    assert queries.samples_of(session, timed.uuid) == ((0.1, 0.2), (), (0.3,))
    assert queries.samples_of(session, untimed.uuid) == ()
    with pytest.raises(NotFoundError, match="no measurement nope"):
        queries.samples_of(session, "nope")


def test_run_info_of_an_unknown_run_is_refused(session):
    with pytest.raises(NotFoundError, match="no run nope is stored"):
        queries.run_info(session, "nope")


def test_finished_run_has_its_time(session, build):
    run = build.a_run(status="running")
    begin_run(session, run, build.a_commit())
    moment = datetime(2025, 11, 21, 11, tzinfo=UTC)

    finish_run(session, run.uuid, "interrupted", finished_at=moment)

    (summary,) = queries.runs(session)
    assert (summary.status, summary.finished_at) == ("interrupted", moment)


def test_last_attempt_is_chosen_per_gpu(session, build, add):
    run = build.a_run(plan=("a",))
    for name, gpu, status in (
        ("h200 first", "NVIDIA H200", "failed"),
        ("h200 again", "NVIDIA H200", "ok"),
        ("a100", "NVIDIA A100", "noisy"),
    ):
        add(name, run=run, case="a", gpu=gpu, status=status)

    rows = queries.run_results(session, run.uuid)

    assert {(row.gpu, row.status) for row in rows} == {
        ("NVIDIA H200", "ok"), ("NVIDIA A100", "noisy"),
    }  # fmt: skip
    (summary,) = queries.runs(session)
    assert summary.statuses == {"ok": 1, "noisy": 1}


def test_later_attempt_replaces_one_of_an_unknown_kernel(session, build, add):
    run = build.a_run(plan=("a",))
    add("1", run=run, case="a", status="failed", kernel_version=0)
    add("2", run=run, case="a")

    (row,) = queries.run_results(session, run.uuid)

    assert row.status == "ok"


def created_at(hour, **changes):
    """Return changes of a record with the hour of its measurement."""
    return {"created_at": f"2025-11-21T{hour:02}:00:00+00:00", **changes}


def test_latest_results_are_the_newest_accepted_of_each_series(session, build, add):
    add("old", run=build.a_run("1"), median_us=9.0, **created_at(1))
    add("new", run=build.a_run("2"), median_us=8.0, **created_at(2))
    rejected = created_at(3, median_us=1.0, accepted=False)
    add("bad", run=build.a_run("3"), **rejected)
    add("other", m=8, run=build.a_run("1"), median_us=7.0, **created_at(1))

    rows = queries.latest_results(session)

    assert [(row.m, row.median_us) for row in rows] == [(1, 8.0), (8, 7.0)]


def test_static_metrics_are_not_times(session, add):
    add(metric="registers", unit="", gpu="sm_90")

    assert queries.latest_results(session) == []
    assert queries.gpu_names(session) == ()


def test_series_filters_narrow(session, build, add):
    for gpu in ("NVIDIA H200", "NVIDIA A100"):
        add(gpu, run=build.a_run(gpu), gpu=gpu)

    rows = queries.latest_results(session, Filters(gpus=("NVIDIA A100",)))

    assert [row.gpu for row in rows] == ["NVIDIA A100"]
    assert queries.gpu_names(session) == ("NVIDIA A100", "NVIDIA H200")


def test_results_at_a_commit_exclude_dirty_trees_and_other_suites(session, build, add):
    for order, median in ((1, 9.0), (2, 8.0)):
        commit = build.a_commit(order)
        add(
            str(order),
            run=build.a_run(str(order)),
            commit=commit,
            median_us=median,
            **created_at(order),
        )
    dirty = build.a_commit(1, dirty=True)
    add("d", run=build.a_run("d"), commit=dirty, median_us=1.0, **created_at(5))

    sha = build.a_commit(1).sha
    assert [row.median_us for row in queries.results_at_commit(session, sha)] == [9.0]
    other = Filters(suites=("nightly",))
    assert queries.results_at_commit(session, sha, other) == []


def test_result_detail_has_device_environment_and_extra(session, add):
    record = add(extra={"before": {"sm_clock_mhz": 1980.0}})

    detail = queries.result_detail(session, record.uuid)

    assert detail.result.kernel == record.kernel
    assert detail.device == record.device.uuid
    assert detail.sm_clock_mhz == record.sm_clock_mhz
    assert detail.placement_medians_us == record.placement_medians_us
    assert detail.environment == record.environment
    assert detail.extra == {"before": {"sm_clock_mhz": 1980.0}}


def test_measurement_that_is_not_stored_is_an_error(session):
    with pytest.raises(NotFoundError, match="no measurement nowhere is stored"):
        queries.result_detail(session, "nowhere")


def test_releases_are_tags_of_stored_clean_commits(session, build, add):
    for order in (1, 2):
        add(f"{order}", commit=build.a_commit(order))
    add("dirty", m=2, commit=build.a_commit(3, dirty=True))
    tags = {"v1": build.a_commit(1).sha, "v2": build.a_commit(2).sha,
            "dirty": build.a_commit(3).sha, "never-measured": "f" * 40}  # fmt: skip

    assert store_releases(session, tags) == ["v1", "v2"]
    assert [(r.name, r.topo_order) for r in queries.releases(session)] == [("v2", 2), ("v1", 1)]


def test_moved_tag_is_updated_and_an_equal_one_changes_nothing(session, build, add):
    for order in (1, 2):
        add(f"{order}", commit=build.a_commit(order))
    store_releases(session, {"v1": build.a_commit(1).sha})

    assert store_releases(session, {"v1": build.a_commit(1).sha}) == []
    assert store_releases(session, {"v1": build.a_commit(2).sha}) == ["v1"]
    assert [r.sha for r in queries.releases(session)] == [build.a_commit(2).sha]
