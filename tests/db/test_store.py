from __future__ import annotations

import dataclasses
import math
from dataclasses import fields

import numpy as np
import pytest
from sqlalchemy import func, select

from flexq_bench.db import queries
from flexq_bench.db.errors import NotFoundError, RecordError
from flexq_bench.db.records import Record
from flexq_bench.db.store import begin_run, finish_run
from flexq_bench.db.tables import Commit, Device, Epoch, Measurement, Run, Series


def count(session, table):
    return session.scalar(select(func.count()).select_from(table))


def test_change_of_identity_is_another_series(session, add):
    changes = {
        "kernel": "other",
        "kernel_version": 2,
        "variant": "vanilla",
        "backend": "cpu",
        "stage": "linear",
        "cache": "hot",
        "metric": "energy",
        "unit": "uJ",
        "direction": "higher",
        "m": 2,
        "n": 2,
        "k": 2,
        "weight_bits": 4,
        "act_bits": 8,
        "group": None,
        "input_distribution": "uniform",
        "protocol_version": 2,
        "gpu": "NVIDIA A100",
    }
    add()
    for number, (name, value) in enumerate(changes.items(), start=2):
        add(name, **{name: value})
        assert count(session, Series) == number, name


def test_model_layer_and_environment_are_not_identity(session, add):
    add("one")
    add("two", model="opt", layer="fc1", environment={"driver": "590"})

    assert count(session, Series) == 1


def test_environment_change_opens_an_epoch(session, build, add):
    for order, driver in ((1, "580"), (2, "590"), (3, "580")):
        commit = build.a_commit(order)
        add(f"at {order}", commit=commit, environment={"driver": driver})

    (series,) = queries.list_series(session)
    points = queries.series_history(session, series.id)
    first, second, third = (point.epoch for point in points)
    assert first == third != second
    # What a night reads of them is the same.
    names = [field.name for field in fields(queries.TimedPoint) if field.name != "id"]
    [timed] = queries.timed_histories(session, [series.id]).values()
    assert [[getattr(point, name) for name in names] for point in timed] == [
        [getattr(point, name) for name in names] for point in points
    ]
    assert queries.first_time(session, timed[1:]) == points[1].created_at
    assert queries.first_time(session, []) is None


def test_another_host_opens_no_epoch(session, build, add):
    for order in (1, 2, 3):  # as in containers, whose host names are drawn anew
        environment = {"driver": "580", "host": f"container-{order}"}
        add(f"at {order}", commit=build.a_commit(order), environment=environment)

    (series,) = queries.list_series(session)
    points = queries.series_history(session, series.id)
    hosts = [
        queries.result_detail(session, point.measurement).environment["host"] for point in points
    ]
    assert [point.epoch for point in points] == [1, 1, 1]
    assert queries.trusted_bases(session, [series.id]) == {series.id: points[0].commit}
    assert hosts == ["container-1", "container-2", "container-3"]


def test_epoch_begins_with_its_earliest_result(session, build, add):
    late, early = build.a_run("late"), build.a_run("early")
    add(run=late, created_at="2025-11-22T00:00:00+00:00")
    add(run=early, created_at="2025-11-20T00:00:00+00:00")

    first = session.scalar(select(Run.uuid).join(Epoch, Epoch.first_run_id == Run.id))
    assert first == early.uuid


def test_unknown_fields_of_a_commit_are_filled_in(session, build, add):
    shallow = build.a_commit(7, topo_order=None, subject="")
    add("one", commit=shallow)
    add("two", commit=build.a_commit(7, author="Eve"))

    commit = session.scalars(select(Commit)).one()
    assert (commit.topo_order, commit.subject, commit.author) == (7, "Change 7", "Ada")


def test_dirty_tree_is_not_its_commit(session, build, add):
    add("one", commit=build.a_commit(1))
    add("two", commit=build.a_commit(1, dirty=True))

    assert sorted(session.scalars(select(Commit.dirty))) == [False, True]


def test_device_with_another_power_limit_is_another_row(session, build, add):
    add("one")
    add("two", device=build.a_device(power_limit_w=500.0))

    assert count(session, Device) == 2
    assert {r.device.power_limit_w for r in queries.stored_records(session, Record)} == {
        700.0,
        500.0,
    }


def test_begin_run_resumes_the_run_of_the_idempotency_key(session, build):
    first = build.a_run("first", status="running", idempotency_key="nightly", plan=("a", "b"))
    begin_run(session, first, build.a_commit())
    finish_run(session, first.uuid, "interrupted")

    again = build.a_run("second", status="running", idempotency_key="nightly", plan=("b", "c"))
    stored = begin_run(session, again, build.a_commit())

    assert stored == dataclasses.replace(first, plan=("a", "b", "c"))
    assert count(session, Run) == 1


def test_finish_run_refuses_unknown_runs_and_statuses(session, build):
    begin_run(session, build.a_run(), build.a_commit())

    with pytest.raises(NotFoundError, match="no run nope is stored"):
        finish_run(session, "nope", "complete")
    with pytest.raises(RecordError, match="not one of running, complete"):
        finish_run(session, build.a_run().uuid, "done")


def test_infinite_max_rel_error_is_stored_as_null(session, add):
    add(status="incorrect", max_rel_error=math.nan)

    assert [r.max_rel_error for r in queries.stored_records(session, Record)] == [None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"median_us": math.inf}, "median_us is inf"),
        ({"samples_us": ((1.0, math.nan),)}, "samples_us is nan"),
        ({"config": {"x": math.nan}}, "config holds what JSON can't"),
        ({"status": "fine"}, "status is 'fine', not one of ok, noisy"),
        ({"m": 0}, "m is 0, out of range"),
        ({"seed": 2**63}, "out of range"),
        ({"detail": "a\x00b"}, "detail holds a NUL"),
        ({"detail": "\ud800"}, "detail is not Unicode"),
        ({"created_at": "2025-11-21T10:00:00"}, "created_at must be an ISO 8601 time"),
        ({"created_at": "yesterday"}, "created_at must be an ISO 8601 time"),
        ({"exact": 1}, "exact must be true or false, got 1"),
        ({"n_samples": 1.5}, "n_samples must be a whole number, got 1.5"),
        ({"environment": {"driver": 580}}, "environment.driver must be text, got 580"),
    ],
)
def test_invalid_field_is_refused_by_name(session, add, change, message):
    with pytest.raises(RecordError, match=message):
        add(**change)

    assert count(session, Measurement) == 0


def test_numpy_values_and_time_zones_are_converted(session, add):
    add(
        median_us=np.float32(0.5),
        n_samples=np.int64(2),
        exact=np.bool_(True),
        samples_us=(np.array([0.5, 0.25]),),
        created_at="2025-11-21T12:00:00+02:00",
    )

    (stored,) = queries.stored_records(session, Record)
    assert (stored.median_us, stored.n_samples, stored.exact) == (0.5, 2, True)
    assert stored.samples_us == ((0.5, 0.25),)
    assert stored.created_at == "2025-11-21T10:00:00+00:00"
