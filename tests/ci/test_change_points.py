"""Storage and retraction of change points."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_nights import IDENTITY, MadePool

from flexq_bench.ci.change_points import steps_beside_others, store_change_points
from flexq_bench.ci.reports import nightly as night_report
from flexq_bench.db import queries
from flexq_bench.db.records import DeviceInfo
from flexq_bench.db.store import add_record, begin_run
from flexq_bench.measure import Measured
from flexq_bench.runs.lifecycle import new_run
from flexq_bench.runs.machine import Machine
from flexq_bench.runs.record import build_record
from flexq_bench.stats.level_model import DeviceChange, LevelModel, Spell
from flexq_bench.verdicts.change_points import Change, ChangePoints, reason_without_step
from flexq_bench.workloads.case import Case


def found_at(database, **series):
    """The only change point of the series with these fields."""
    with database.session() as session:
        (found,) = (
            s.id
            for s in queries.series_names(session)
            if all(getattr(s, name) == value for name, value in series.items())
        )
        [point] = queries.change_points_of(session, found, with_retracted=True)
    return point


@pytest.fixture
def measured(database, commits, sha):
    """measured(order, times): store microseconds at M = 1, 2, …, then the change points."""

    def store(order, times, device="A CPU 1"):
        machine = Machine("cpu", DeviceInfo(device, "A CPU", "cpu"))
        cases = [Case.from_key(f"flexq-w6a6 gemm cold m{m + 1}n256k256") for m in range(len(times))]
        run = replace(
            new_run("made", "nightly", tuple(case.key for case in cases)),
            created_at=f"2025-11-{order:02}T00:00:00+00:00",
        )
        commit = commits[sha(order)]
        with database.session() as session:
            begin_run(session, run, commit)
            for case, us in zip(cases, times, strict=True):
                identity = {name: machine.series_of(case)[name] for name in IDENTITY}
                one = Measured("ok", "", 0, median_us=float(us), **identity)
                add_record(session, build_record(case, one, run, commit, machine.device, {}))
            return store_change_points(session, run.uuid, machine.device)

    return store


def test_change_point_is_stored_once(measured, database, sha):
    seen = [measured(order, [20.0 if order <= 15 else 22.0]) for order in range(1, 31)]

    found = found_at(database, kernel="flexq-w6a6")
    assert (found.commit, found.before, found.after) == (
        sha(16),
        pytest.approx(20.0),
        pytest.approx(22.0),
    )
    assert (sum(one.stored for one in seen), found.retracted) == (1, None)


def test_change_point_is_retracted_when_the_level_returns(a_night, database):
    times = (*[20.0] * 23, *[32.0] * 3, *[20.0] * 4)
    reports = [a_night(order, us=us)[1][0] for order, us in enumerate(times, 1)]

    assert sum(report.change_points for report in reports) == 3
    assert "3 retracted" in "\n".join(night_report.lines(reports))
    found = found_at(database, kernel="flexq-w6a6")
    assert found.retracted == "the level was back after 3 results"


def test_retraction_reason_is_the_nearest_cause():
    up, down = Change(52, 20.0, 21.0, 1e-6), Change(46, 21.0, 20.0, 1e-6)

    def reason(steps=(), **parts):
        found = ChangePoints(steps, (), LevelModel(100, **parts))
        return reason_without_step(found, 49, rises=True)

    assert reason(spells=(Spell(49, 52, 0.1),)) == "the level was back after 3 results"
    assert reason((down, up)) == "later results place the step +3 results from here"
    assert reason((down,)) == "later results do not bear it out"


class PoolOfTwo(MadePool):
    """On a second device each case takes 2 % longer. device: which of the two measures."""

    device = 1

    def measure(self, works, on_record):
        self.us *= 1.02 if self.device == 2 else 1.0
        super().measure(works, on_record)

    def machine(self, gpu):
        return Machine("cpu", DeviceInfo(f"{gpu} {self.device}", gpu, "cpu"))


def test_level_change_with_the_device_is_a_note(a_night, database, commits, sha, compared):
    reports = []
    for order in range(1, 17):
        pool = PoolOfTwo(database, commits[sha(order)], compared)
        pool.device = 1 if order <= 9 else 2
        reports += a_night(order, pool=pool)[1]

    assert [report.change_points for report in reports] == [0] * 16
    noted = [report.night for report in reports if "changed with the device" in str(report.notes)]
    assert noted == ["2025-11-12"]


@pytest.mark.slow
def test_step_with_the_device_is_stored_when_the_device_returns(
    a_night, database, commits, sha, compared
):
    for order in range(1, 31):
        us = 20.0 if order <= 15 else 21.0
        pool = PoolOfTwo(database, commits[sha(order)], compared, us)
        pool.device = 2 if 16 <= order <= 19 else 1
        a_night(order, pool=pool)

    found = found_at(database, kernel="flexq-w6a6")
    assert found.commit == sha(16)
    assert found.after / found.before == pytest.approx(1.05, abs=0.003)


def test_series_that_differs_from_the_device_change_is_a_step():
    rng = np.random.default_rng(1)
    shifts = 0.02 + 0.003 * rng.standard_normal(40)
    shifts[7] += 0.03
    changes = {
        series: DeviceChange(60, 20.0, 20.0 * float(np.exp(shift)), 0.001)
        for series, shift in enumerate(shifts)
    }

    [(series, step)] = steps_beside_others(changes).items()

    assert (series, step.index) == (7, 60)
    assert step.relative == pytest.approx(0.03, abs=0.008)
    few = {series: changes[series] for series in range(4, 9)}
    assert steps_beside_others(few) == {}


@pytest.mark.slow
def test_step_besides_a_device_change_stays_stored(measured, database, sha):
    rng = np.random.default_rng(2)
    seen = []
    for order in range(1, 17):
        times = 20.0 * np.exp(0.002 * rng.standard_normal(8)) * (1.02 if order >= 10 else 1.0)
        times[7] *= 1.05 if order >= 10 else 1.0
        seen.append(measured(order, times, "A CPU 1" if order < 10 else "A CPU 2"))

    assert sum(one.stored for one in seen) == 1
    assert sum(one.retracted for one in seen) == 0
    found = found_at(database, m=8)
    assert found.commit == sha(10)
    assert found.after / found.before == pytest.approx(1.05, abs=0.006)
