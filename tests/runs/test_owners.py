"""Owners of runs: detection of killed processes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from flexq_bench.cli.app import main
from flexq_bench.db import queries
from flexq_bench.db.fleet import JobInfo, add_jobs, claim_jobs
from flexq_bench.db.store import begin_run
from flexq_bench.errors import UsageError
from flexq_bench.runs.lifecycle import new_run, open_run, store_results
from flexq_bench.runs.owner_process import is_alive, is_dead, this_process
from flexq_bench.runs.resume import read_unfinished
from flexq_bench.runs.worker import MeasuredCase


def killed_process():
    """The owner that a process of this host was."""
    code = (
        "from flexq_bench.runs.owner_process import this_process as t; o = t(); "
        "print(o.pid, o.start)"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    pid, _, start = told.stdout.strip().partition(" ")
    return replace(this_process(), pid=int(pid), start=start)


@pytest.fixture
def a_run(database, commit, a_case):
    """a_run(owner): a run of one case that says it is running."""

    def make(owner):
        run = new_run("smoke", "manual", [a_case().key])
        with database.session() as session:
            return begin_run(session, run, commit, owner).uuid

    return make


def status_of(database, uuid):
    with database.session() as session:
        return queries.run_by_uuid_prefix(session, uuid).status


def test_process_is_alive_until_it_ends():
    gone, here = killed_process(), this_process()

    assert (is_alive(here), is_dead(here)) == (True, False)
    assert (is_alive(gone), is_dead(gone)) == (False, True)
    assert is_dead(replace(here, start=f"{here.start}0"))  # a later process of the same number
    assert not is_dead(replace(gone, host="elsewhere"))
    assert is_dead(replace(here, start=f"another-boot {here.start.partition(' ')[2]}"))


def test_status_reports_and_ends_a_dead_run(database, a_run, capsys):
    dead, alive = a_run(killed_process()), a_run(this_process())
    path = str(database.path)

    assert main(["status", "--db", path]) == 0
    told = capsys.readouterr().out
    assert f"run {dead[:8]}" in told
    assert "is dead" in told
    assert f"run --resume {dead[:8]} --db {path}" in " ".join(told.split())
    assert status_of(database, dead) == "running"  # looking changes nothing

    assert main(["status", "--reap", "--db", path]) == 0
    assert (status_of(database, dead), status_of(database, alive)) == ("interrupted", "running")
    told = " ".join(capsys.readouterr().out.split())
    assert f"run --resume {dead[:8]} --db {path}" in told


def test_next_run_ends_runs_of_killed_processes(database, a_run, commit):
    dead = a_run(killed_process())

    with open_run(database, new_run("smoke", "manual", ()), commit):
        pass

    assert status_of(database, dead) == "interrupted"


def test_run_with_leased_jobs_is_not_resumed_locally(database, a_run, a_case, commit):
    uuid, now = a_run(None), datetime.now(UTC)
    with database.session() as session:
        add_jobs(session, uuid, [JobInfo(a_case().key)])
        [job] = queries.jobs_of(session, uuid)
        claim_jobs(session, {job.id: "w"}, until=now + timedelta(minutes=1), at=now)

    with pytest.raises(UsageError, match=r"a fleet measures run .* hold 1 jobs"):
        read_unfinished(database, uuid, None, commit, repetitions=False)
    assert read_unfinished(database, uuid, None, commit, repetitions=True).cases


def test_lease_of_a_clock_set_back_is_no_obstacle(database, a_run, a_case, commit):
    uuid, ahead = a_run(None), datetime.now(UTC) + timedelta(hours=1)
    with database.session() as session:
        add_jobs(session, uuid, [JobInfo(a_case().key)])
        [job] = queries.jobs_of(session, uuid)
        claim_jobs(session, {job.id: "w"}, until=ahead + timedelta(minutes=1), at=ahead)

    assert read_unfinished(database, uuid, None, commit, repetitions=False).run.uuid == uuid


def test_run_of_a_live_process_is_not_resumed(database, a_run, commit):
    with subprocess.Popen(["sleep", "60"]) as other:
        from flexq_bench.runs import owner_process

        start = f"{owner_process._pid_scope()} {owner_process._start_ticks(other.pid)}"
        uuid = a_run(replace(this_process(), pid=other.pid, start=start))
        try:
            with pytest.raises(UsageError, match=f"process {other.pid} on this host measures"):
                read_unfinished(database, uuid, None, commit, repetitions=False)
        finally:
            other.kill()


def test_retried_case_is_stored_once(database, a_case, a_result, commit, worker):
    run, cases = new_run("smoke", "manual", [a_case().key]), [a_case()]
    with open_run(database, run, commit) as opened:
        for attempt in (1, 2):
            found = MeasuredCase(cases[0], a_result(median_us=20.0 + attempt), worker, attempt)
            store_results(opened, cases, [found], on_record=lambda record: None)

    with database.session() as session:
        [record] = queries.run_records(session, run.uuid)
    assert record.median_us == 21.0
