"""Stalled runs and requests, in lines and as metrics."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from flexq_bench.cli.app import main
from flexq_bench.db.fleet import Beat, JobInfo, WorkerInfo, add_jobs, beat, register_worker
from flexq_bench.db.nightly import NightInfo, set_night
from flexq_bench.db.records import CommitInfo, DeviceInfo, RunInfo
from flexq_bench.db.requests import Limits, RequestInfo, add_request
from flexq_bench.db.store import begin_run
from flexq_bench.fleet.watchdog import stalls
from flexq_bench.runs.owner_process import this_process

CASE = "flexq-w6a6 gemm cold m1n64k64"
COMMIT = CommitInfo("a" * 40, None, 1, dirty=False)
HOUR = timedelta(hours=1)


@pytest.fixture
def begun(database):
    """begun(HOUR): a run with one job that was begun so long ago, owned by this process."""

    def begin(ago, *, owner=None):
        at = (datetime.now(UTC) - ago).isoformat()
        run = RunInfo("r" * 36, "made", "manual", "running", at, "key", (CASE,))
        with database.session() as session:
            begin_run(session, run, COMMIT, owner or this_process())
            add_jobs(session, run.uuid, [JobInfo(CASE)])

    return begin


@pytest.fixture
def worker(database):
    """worker(HOUR): one whose last sign of life is so long ago."""

    def register(silent, *, case=None):
        at = datetime.now(UTC) - silent
        device = DeviceInfo("GPU-1", "NVIDIA H200", "cuda")
        with database.session() as session:
            register_worker(session, WorkerInfo("w1", "node7", 1, device, {}), at=at)
            beat(session, [Beat("w1", case, 55.0, 4, 9.0)], until=at, at=at)

    return register


def found(database):
    with database.session() as session:
        return [stall.line for stall in stalls(session)]


def test_progress_is_no_stall(database, begun, worker):
    begun(timedelta(seconds=30))
    worker(timedelta(seconds=1))

    assert found(database) == []


def test_run_without_a_worker_is_stalled(database, begun):
    begun(HOUR)

    assert found(database) == [
        "run rrrrrrrr made has been stalled for 60 min: 1 jobs wait and no worker is alive"
    ]


@pytest.mark.parametrize(("ago", "stalled"), [(timedelta(minutes=20), 0), (2 * HOUR, 1)])
def test_run_that_compares_is_stalled_after_an_hour(database, ago, stalled):
    run = RunInfo("r" * 36, "gate", "gate", "running", (datetime.now(UTC) - ago).isoformat(), "key")
    with database.session() as session:
        begin_run(session, run, COMMIT, this_process())
        add_jobs(session, run.uuid, [JobInfo("a..b", content={})])

    assert len(found(database)) == stalled


def test_silent_worker_is_named_with_its_host(database, begun, worker):
    begun(HOUR)
    worker(timedelta(minutes=20))

    assert "worker w1 on node7 is silent for 1200 s" in found(database)[0]


def test_busy_worker_is_named_with_its_case(database, begun, worker):
    begun(3 * HOUR)
    worker(timedelta(seconds=5), case=CASE)

    assert found(database) == [
        f"run rrrrrrrr made has been stalled for 3.0 h: worker w1 on node7 is still in {CASE}"
    ]


def test_run_of_a_dead_process_is_stalled_at_once(database, begun):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    begun(timedelta(seconds=1), owner=replace(this_process(), pid=dead.pid))

    assert f"its process {dead.pid} on {os.uname().nodename} is dead" in found(database)[0]


@pytest.mark.parametrize("is_dead", [True, False])
def test_night_of_a_dead_process_is_stalled_before_an_hour(database, begun, is_dead):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    owner = replace(this_process(), pid=dead.pid) if is_dead else this_process()
    begun(timedelta(minutes=5), owner=owner)
    info = NightInfo("key", "2025-11-08", "made", "NVIDIA H200", "r" * 36)
    with database.session() as session:
        set_night(session, info, "comparing", at=datetime.now(UTC) - timedelta(minutes=5))

    nights = [line for line in found(database) if line.startswith("night")]

    assert len(nights) == is_dead
    assert all("its process is dead, it is comparing" in line for line in nights)


def test_request_without_a_worker_is_stalled(database):
    when = datetime.now(UTC) - HOUR
    info = RequestInfo("q" * 36, "sweep", {}, "Ada", "NVIDIA H200", 3, None, when)
    with database.session() as session:
        add_request(session, info, limits=Limits(9, 99, 99, 9, 99))

    assert found(database) == [
        "request qqqqqqqq of Ada has been stalled for 60 min: no worker is alive on NVIDIA H200 "
        "(flexq-bench worker)"
    ]


def test_status_and_metrics_report_stalls(database, begun, capsys):
    begun(HOUR)

    assert main(["status", "--db", database.url]) == 0
    assert "has been stalled for 60 min" in capsys.readouterr().out.splitlines()[0]
    assert main(["status", "--prometheus", "--db", database.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "flexq_database_up 1",
        'flexq_runs{status="running"} 1',
        'flexq_queue_depth{of="jobs"} 1',
        'flexq_queue_depth{of="requests"} 0',
        "flexq_quarantined_jobs 0",
    ):
        assert line in lines
    stalled = [line for line in lines if line.startswith("flexq_stalled_seconds{")]
    assert [line.partition("}")[0] for line in stalled] == [
        'flexq_stalled_seconds{what="run",name="rrrrrrrr made"'
    ]


def test_metrics_report_an_unavailable_database(capsys):
    code = main(["status", "--prometheus", "--db", "postgresql://nobody@127.0.0.1:1/x"])

    assert code == 5
    assert capsys.readouterr().out.splitlines()[-1] == "flexq_database_up 0"
