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


def test_change_point_is_stored_once(a_night, database, sha):
    for order in range(1, 27):
        _, [report] = a_night(order, us=20.0 if order <= 12 else 25.0)

    with database.session() as session:
        series = next(s.id for s in queries.series_names(session) if s.kernel == "flexq-w6a6")
        [found] = queries.change_points_of(session, series)
    assert (found.commit, found.before, found.after) == (
        sha(13),
        pytest.approx(20.0),
        pytest.approx(25.0),
    )
    assert report.change_points == 0


def test_change_point_is_retracted_when_the_level_returns(a_night, database):
    times = (*[20.0] * 23, *[25.0] * 3, *[20.0] * 4)
    reports = [a_night(order, us=us)[1][0] for order, us in enumerate(times, 1)]

    assert sum(report.change_points for report in reports) == 3
    assert "3 retracted" in "\n".join(night_report.lines(reports))
    with database.session() as session:
        series = next(s.id for s in queries.series_names(session) if s.kernel == "flexq-w6a6")
        [found] = queries.change_points_of(session, series, with_retracted=True)
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
    for order in range(1, 27):
        us = 20.0 if order <= 7 else 25.0
        pool = PoolOfTwo(database, commits[sha(order)], compared, us)
        pool.device = 2 if 8 <= order <= 11 else 1
        a_night(order, pool=pool)

    with database.session() as session:
        series = next(s.id for s in queries.series_names(session) if s.kernel == "flexq-w6a6")
        [found] = queries.change_points_of(session, series)
    assert found.commit == sha(8)
    assert found.after / found.before == pytest.approx(1.25, abs=0.01)


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


def test_step_besides_a_device_change_stays_stored(database, commits, sha):
    rng = np.random.default_rng(2)
    cases = [Case.from_key(f"flexq-w6a6 gemm cold m{m}n256k256") for m in range(1, 9)]
    seen = []
    for order in range(1, 17):
        name = "A CPU 1" if order < 10 else "A CPU 2"
        machine = Machine("cpu", DeviceInfo(name, "A CPU", "cpu"))
        run = replace(
            new_run("made", "nightly", tuple(case.key for case in cases)),
            created_at=f"2025-11-{order:02}T00:00:00+00:00",
        )
        with database.session() as session:
            begin_run(session, run, commits[sha(order)])
            for case in cases:
                us = 20.0 * np.exp(0.002 * rng.standard_normal()) * (1.02 if order >= 10 else 1.0)
                us *= 1.05 if order >= 10 and case.gemm.m == 8 else 1.0
                identity = {name: machine.series_of(case)[name] for name in IDENTITY}
                measured = Measured("ok", "", 0, median_us=float(us), **identity)
                at = commits[sha(order)]
                add_record(session, build_record(case, measured, run, at, machine.device, {}))
            seen.append(store_change_points(session, run.uuid, machine.device))

    assert sum(one.stored for one in seen) == 1
    assert sum(one.retracted for one in seen) == 0
    with database.session() as session:
        slower = next(s.id for s in queries.series_names(session) if s.m == 8)
        [found] = queries.change_points_of(session, slower)
    assert found.commit == sha(10)
    assert found.after / found.before == pytest.approx(1.05, abs=0.006)
