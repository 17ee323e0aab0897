"""Leases: a job is handed out once at a time and ends with one result, whoever dies when."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from flexq_bench.db import queries
from flexq_bench.db.errors import NotFoundError
from flexq_bench.db.fleet import (
    Beat,
    JobInfo,
    OffsetInfo,
    WorkerInfo,
    add_jobs,
    add_offsets,
    beat,
    claim_jobs,
    end_worker,
    finish_jobs,
    forget_silent_workers,
    register_worker,
    reopen_jobs,
    return_jobs,
)
from flexq_bench.db.queries.records import run_records
from flexq_bench.db.store import begin_run

NOW = datetime(2025, 11, 21, 10, tzinfo=UTC)
LEASE = timedelta(seconds=30)
CASES = ("a gemm cold m1n64k64", "b gemm cold m1n64k64")


@pytest.fixture
def run(session, build):
    return begin_run(session, build.a_run(plan=CASES, status="running"), build.a_commit())


@pytest.fixture
def jobs(session, run):
    """Ids of two queued jobs, by case."""
    add_jobs(session, run.uuid, [JobInfo(key, expected_s=2.0) for key in CASES])
    return {job.case_key: job.id for job in queries.jobs_of(session, run.uuid)}


def claim(session, job, worker="w1", at=NOW):
    return claim_jobs(session, {job: worker}, until=at + LEASE, at=at)


def states(session, run):
    return {job.case_key: job.state for job in queries.jobs_of(session, run.uuid)}


def test_case_is_to_be_measured_until_all_repetitions_are_done(session, build, run, jobs):
    add_jobs(session, run.uuid, [JobInfo(CASES[0], repetition=2)])
    record = build.a_record(run=run, case=CASES[0])
    claim(session, jobs[CASES[0]])
    finish_jobs(session, {jobs[CASES[0]]: record})

    assert queries.missing_cases(session, run.uuid) == CASES[1:]
    assert queries.cases_to_measure(session, run.uuid) == CASES

    [second] = [j for j in queries.jobs_of(session, run.uuid) if j.repetition == 2]
    claim(session, second.id)
    finish_jobs(session, {second.id: build.a_record("2", run=run, case=CASES[0])})
    assert queries.cases_to_measure(session, run.uuid) == CASES[1:]


def test_jobs_are_added_once(session, run, jobs):
    again = [JobInfo(CASES[0]), JobInfo(CASES[0], repetition=2)]

    assert add_jobs(session, run.uuid, again) == 1
    with pytest.raises(NotFoundError, match="no run nothing is stored"):
        add_jobs(session, "nothing", again)


def test_leased_job_is_free_after_its_lease_expires(session, jobs):
    job = jobs[CASES[0]]

    assert claim(session, job) == {job: 1}
    assert claim(session, job, "w2", at=NOW + LEASE / 2) == {}
    assert claim(session, job, "w2", at=NOW + 2 * LEASE) == {job: 2}
    assert claim(session, job, "w3", at=NOW - 9 * LEASE) == {job: 3}  # the clock was set back


def test_heartbeat_renews_only_the_lease_of_the_current_job(session, jobs):
    measured, forgotten = (jobs[case] for case in CASES)
    claim(session, measured)
    claim(session, forgotten)
    later = NOW + LEASE / 2

    beat(session, [Beat("w1", CASES[0], None, 0, 0.0, measured)], until=later + LEASE, at=later)

    assert claim(session, measured, "w2", at=NOW + LEASE * 1.2) == {}
    assert claim(session, forgotten, "w2", at=NOW + LEASE * 1.2) == {forgotten: 2}


def test_coordinator_reclaims_unconfirmed_leases_of_its_own_workers(session, jobs):
    job = jobs[CASES[0]]
    claim(session, job, "w1")

    again = claim_jobs(session, {job: "w2"}, until=NOW + LEASE, at=NOW, own_workers={"w1", "w2"})

    assert again == {job: 2}


def test_only_the_first_result_of_a_job_is_kept(session, build, run, jobs):
    job = jobs[CASES[0]]
    claim(session, job)
    claim(session, job, "w2", at=NOW + 2 * LEASE)
    late, new = (build.a_record(name, run=run, case=CASES[0]) for name in ("late", "new"))

    assert finish_jobs(session, {job: late}) == {job}
    assert finish_jobs(session, {job: new}) == set()
    assert [record.uuid for record in run_records(session, run.uuid)] == [late.uuid]
    assert claim(session, job, "w3", at=NOW + 9 * LEASE) == {}


def test_returned_job_counts_worker_deaths(session, jobs):
    job = jobs[CASES[0]]
    claim(session, job)
    assert return_jobs(session, {job: "the node is gone"}, death=False) == {job: 0}
    claim(session, job)

    assert return_jobs(session, {job: "killed"}, death=True) == {job: 1}
    assert claim(session, job) == {job: 3}


def test_job_without_a_device_is_queued_by_reopen(session, run):
    add_jobs(session, run.uuid, [JobInfo(CASES[0], reason="needs an H200")])
    assert states(session, run) == {CASES[0]: "no-device"}

    reopen_jobs(session, run.uuid, {})

    assert states(session, run) == {CASES[0]: "queued"}


def test_progress_counts_states_and_expected_seconds(session, build, run, jobs):
    job = jobs[CASES[0]]
    claim(session, job)
    finish_jobs(session, {job: build.a_record(run=run, case=CASES[0])})

    [row] = queries.progress(session)

    assert (row.run, row.states, row.total, row.open) == (run.uuid, {"done": 1, "queued": 1}, 2, 1)
    assert (row.expected_s, row.unknown) == (2.0, 0)


def test_worker_is_live_from_registration_to_end(session, build):
    info = WorkerInfo("w1", "node", 7, build.a_device(), {"driver": "580"})
    register_worker(session, info, at=NOW)
    register_worker(session, info, at=NOW)
    later = NOW + LEASE
    beat(session, [Beat("w1", CASES[0], 61.0, 3, 12.5)], until=later + LEASE, at=later)

    [row] = queries.workers(session, live=True)
    assert (row.state, row.case_key, row.temperature_c) == ("measuring", CASES[0], 61.0)
    assert (row.heartbeat_at, row.lease_until, row.finished) == (later, later + LEASE, 3)

    end_worker(session, "w1", detail="killed", at=later)
    assert queries.workers(session, live=True) == []
    [row] = queries.workers(session)
    assert (row.state, row.detail, row.case_key) == ("lost", "killed", None)


def test_silent_worker_is_lost(session, build):
    for name, at in (("old", NOW), ("new", NOW + LEASE)):
        info = WorkerInfo(name, "node", 7, build.a_device(), {})
        register_worker(session, info, at=at)

    assert forget_silent_workers(session, silent_since=NOW + LEASE / 2) == 1
    assert [row.uuid for row in queries.workers(session, live=True)] == ["new"]


def test_offsets_of_a_resumed_run_replace_the_earlier_ones(session, build, run):
    for cases in (3, 8):
        offset = OffsetInfo(build.a_device(), cases, 0.004, 0.001, 0.007)
        add_offsets(session, run.uuid, [offset], at=NOW)

    [row] = queries.device_offsets(session, gpu="NVIDIA H200")
    assert (row.device, row.cases, row.log_offset) == ("GPU-1", 8, 0.004)
