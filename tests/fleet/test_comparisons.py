"""Comparisons as jobs: stored when they arrive, retried on another GPU, resumed by anybody."""

from __future__ import annotations

import json
import math
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from flexq_bench.db import queries
from flexq_bench.db.dialects import database_time
from flexq_bench.db.fleet import ComparisonOutcome, add_jobs, claim_jobs, finish_comparisons
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.errors import (
    BrokenRevisionError,
    DeviceError,
    InfrastructureError,
    UsageError,
)
from flexq_bench.fleet import local_pool
from flexq_bench.fleet.compare_jobs import (
    MAX_CASES,
    Compared,
    CompareJob,
    ComparisonWork,
    job_infos,
    outcome_data,
    stored_comparisons,
)
from flexq_bench.fleet.local_pool import LocalPool, carry_out_comparisons
from flexq_bench.fleet.pool import Kind
from flexq_bench.fleet.run_comparer import comparing_run
from flexq_bench.fleet.workers import Lost
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.verdicts import CaseComparison, Comparison, Verdict, confirm
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.operation import operation

BASE, HEAD = "b" * 40, "c" * 40
COMMIT = CommitInfo(HEAD, None, 1, dirty=False)


def comparison_of(case, us=20.0):
    blocks = Comparison(
        base_us=(20.0, 20.1, 20.2, 20.3) * 6,
        head_us=(us, us + 0.1, math.nan, math.inf) * 6,
        placement=tuple(i // 2 for i in range(24)),
    )
    return CaseComparison(case, BASE, HEAD, blocks, confirm(blocks), base_config={"block_n": 64})


def right(member, job):
    return Compared(tuple(comparison_of(case) for case in job.cases))


@pytest.fixture
def compare_work(table, a_case):
    """compare_work("H200", 3): the work with a job for each of three cases."""

    def make(gpu, count, *, devices=99):
        work = table.work(gpu, [])
        job = CompareJob(BASE, HEAD, tuple(a_case(m) for m in range(1, count + 1)))
        with table.database.session() as session:
            add_jobs(session, work.run.info.uuid, job_infos([job], devices))
        return ComparisonWork(work.run.info.uuid, gpu, Path("/nowhere"))

    return make


def jobs_of(table, work):
    with table.database.session() as session:
        return queries.jobs_of(session, work.run, kind="compare")


def states_of(table, work):
    return [job.state for job in jobs_of(table, work)]


def ignore(job):
    pass


@pytest.mark.parametrize(
    ("cases", "devices", "sizes"),
    [(2, 8, [1, 1]), (50, 4, [13, 13, 13, 11]), (50, 2, [13, 13, 13, 11]), (1, 1, [1]), (0, 4, [])],
)
def test_cases_are_divided_between_the_devices(a_case, cases, devices, sizes):
    job = CompareJob(BASE, HEAD, tuple(a_case(m) for m in range(1, cases + 1)), "theirs")

    infos = list(job_infos([job], devices))

    parts = [CompareJob.from_data(info.content) for info in infos]
    assert [len(part.cases) for part in parts] == sizes
    assert tuple(case for part in parts for case in part.cases) == job.cases
    assert {(part.base, part.head, part.project) for part in parts} <= {(BASE, HEAD, "theirs")}
    assert len({(info.case_key, info.repetition) for info in infos}) == len(infos)
    assert max(sizes, default=0) <= MAX_CASES


def of_gpus(gpus, elements=64):
    workload = operation("all_reduce").workload(elements=elements, gpus=gpus)
    return Case("all-reduce", workload, stage="op")


@pytest.fixture
def mixed_work(table, a_case):
    """mixed_work("H200"): the work of four cases of one GPU and three of two."""

    def make(gpu):
        work = table.work(gpu, [])
        cases = [case for m in (1, 2, 3) for case in (of_gpus(2, 64 * m), a_case(m))]
        job = CompareJob(BASE, HEAD, (*cases, a_case(4)))
        with table.database.session() as session:
            add_jobs(session, work.run.info.uuid, job_infos([job], 2))
        return ComparisonWork(work.run.info.uuid, gpu, Path("/nowhere"))

    return make


def test_comparisons_of_two_gpus_follow_those_of_one(table, gpus, mixed_work):
    workers, work = gpus({"H200": 4}, compares=right), mixed_work("H200")

    table.coordinator(workers).compare([work], ignore)

    assert workers.used == ["compare", "compare 2", "compare"]
    sizes = [job.gpus for _, job in workers.started]
    assert sizes == sorted(sizes)
    assert [{case.gpus for case in job.cases} == {job.gpus} for _, job in workers.started]
    assert set(states_of(table, work)) == {"done"}


def test_comparison_of_too_many_gpus_has_a_reason(table, gpus, mixed_work):
    work = mixed_work("H200")

    table.coordinator(gpus({"H200": 1}, compares=right)).compare([work], ignore)

    ends = {CompareJob.from_data(job.content).gpus: job for job in jobs_of(table, work)}
    assert (ends[1].state, ends[2].state) == ("done", "no-device")
    assert ends[2].reason == "no host with 2 H200 came within 3 s"


def test_stored_comparison_is_restored_exactly(table, gpus, compare_work, a_case):
    work = compare_work("H200", 2, devices=1)

    table.coordinator(gpus({"H200": 1}, compares=right)).compare([work], ignore)

    with table.database.session() as session:
        outcomes = queries.comparison_outcomes(session, work.run)
    asked = {job.id: CompareJob.from_data(job.content) for job in jobs_of(table, work)}
    stored = stored_comparisons(asked, outcomes)
    # NaN is not equal to itself.
    assert repr(stored.comparisons) == repr([comparison_of(a_case(m)) for m in (1, 2)])
    assert [device.uuid for device in stored.devices] == ["H200 0"] * 2


def test_all_gpus_of_all_kinds_compare(table, gpus, compare_work):
    works = [compare_work("H200", 4), compare_work("A100", 2)]
    workers = gpus({"H200": 2, "A100": 1}, compares=right)
    seen = []

    table.coordinator(workers).compare(works, seen.append)

    assert [set(states_of(table, work)) for work in works] == [{"done"}] * 2
    first = [workers._members[member].device for member, _ in workers.started[:3]]
    assert sorted(first) == ["A100 0", "H200 0", "H200 1"]
    assert sorted(seen) == sorted(job.id for work in works for job in jobs_of(table, work))


@pytest.mark.parametrize("blameless", [True, False])
def test_comparison_of_a_lost_worker_goes_to_another_gpu(table, gpus, compare_work, blameless):
    tried = []

    def first_gpu_dies(member, job):
        tried.append(member.device)
        if member.device == "H200 0":
            return Lost(member.uuid, "its node has died", blameless)
        return right(member, job)

    work = compare_work("H200", 1)
    table.coordinator(gpus({"H200": 2}, compares=first_gpu_dies)).compare([work], ignore)

    [job] = jobs_of(table, work)
    assert (tried, job.state, job.attempts) == (["H200 0", "H200 1"], "done", 2)
    assert job.deaths == (0 if blameless else 1)


def test_error_of_a_device_is_retried_on_another_gpu(table, gpus, compare_work):
    tried = []

    def no_git_on_the_first(member, job):
        tried.append(member.device)
        if member.device == "H200 0":
            return Compared(error=InfrastructureError("no git here"))
        return right(member, job)

    work = compare_work("H200", 1)
    table.coordinator(gpus({"H200": 2}, compares=no_git_on_the_first)).compare([work], ignore)

    assert tried == ["H200 0", "H200 1"]
    assert states_of(table, work) == ["done"]


def test_comparison_that_fails_three_times_has_its_reason(table, gpus, compare_work):
    works = [compare_work("H200", 1), compare_work("A100", 1)]

    def fails_on_one_kind(member, job):
        if member.gpu == "H200":
            return Compared(error=InfrastructureError("no git here"))
        return right(member, job)

    table.coordinator(gpus({"H200": 2, "A100": 1}, compares=fails_on_one_kind)).compare(
        works, ignore
    )

    [job], [other] = (jobs_of(table, work) for work in works)
    assert (job.state, job.deaths, other.state) == ("quarantined", 3, "done")
    assert "no git here" in job.reason


def test_code_that_cannot_be_compared_is_refused_at_once(table, gpus, compare_work):
    workers = gpus(
        {"H200": 2}, compares=lambda m, job: Compared(error=BrokenRevisionError("does not build"))
    )
    work = compare_work("H200", 1)

    table.coordinator(workers).compare([work], ignore)

    [job] = jobs_of(table, work)
    assert (job.state, job.reason, len(workers.started)) == ("refused", "does not build", 1)


@pytest.mark.slow
def test_frozen_comparison_is_ended_and_retried(table, gpus, compare_work, clock):
    frozen = []

    def first_is_frozen(member, job):
        frozen.append(member.uuid)
        return None if len(frozen) == 1 else right(member, job)

    work = compare_work("H200", 1)
    workers = gpus({"H200": 2}, compares=first_is_frozen)

    table.coordinator(workers).compare([work], ignore)

    [job] = jobs_of(table, work)
    assert (job.state, job.deaths) == ("done", 1)
    assert workers.ended[0][0] == frozen[0] != frozen[1]


def test_last_gpu_of_a_kind_lost_leaves_other_kinds(table, gpus, compare_work):
    works = [compare_work("H200", 2), compare_work("A100", 2)]

    def one_kind_dies(member, job):
        if member.gpu == "A100":
            return Lost(member.uuid, "its node has died", blameless=True)
        return right(member, job)

    workers = gpus({"H200": 1, "A100": 1}, compares=one_kind_dies, replaces=False)
    table.coordinator(workers).compare(works, ignore)

    assert states_of(table, works[0]) == ["done"] * 2
    assert {(job.state, job.reason) for job in jobs_of(table, works[1])} == {
        ("no-device", "no A100 came within 3 s")
    }


@pytest.mark.parametrize("locally", [False, True])
def test_killed_comparison_is_resumed_by_another_coordinator(
    table, gpus, compare_work, monkeypatch, locally
):
    work = compare_work("H200", 5)
    answers = iter([1, 2, 3])

    def until_killed(member, job):
        if next(answers, None) is None:
            raise SystemExit
        return right(member, job)

    killed = table.coordinator(gpus({"H200": 1}, compares=until_killed))
    monkeypatch.setattr(killed, "_abort", lambda: None)  # SIGKILL leaves no time for it
    with pytest.raises(SystemExit):
        killed.compare([work], ignore)
    assert sorted(states_of(table, work)) == ["done"] * 3 + ["leased", "queued"]
    with table.database.session() as session:
        session.connection().exec_driver_sql("UPDATE job SET lease_until = '2020-01-01 00:00:00'")
    seen = []

    workers = gpus({"H200": 1}, compares=right)
    if locally:
        worker = next(iter(workers._members.values())).worker
        carry_out_comparisons(
            table.database, worker, [work], lambda job, _: right(None, job).comparisons, seen.append
        )
    else:
        table.coordinator(workers).compare([work], seen.append)

    assert states_of(table, work) == ["done"] * 5
    assert len(seen) == 2


@pytest.fixture
def local(table, gpus, monkeypatch):
    """local(compare): a local pool of H200 0, H200 1 and H200 2; compare(device, job, on_block)."""
    [first, *_] = gpus({"H200": 3})._members.values()
    monkeypatch.setattr(local_pool, "device_info", lambda name: DeviceInfo(name, "H200", "cuda"))

    def made(compare):
        pool = LocalPool(
            table.database,
            SimpleNamespace(worker=first.worker, backend="cuda"),
            "H200 0",
            others=("H200 1", "H200 2"),
        )
        pool.compare_here = lambda job, _, *, device, on_block: compare(device, job, on_block)
        return pool

    return made


def test_local_pool_compares_on_all_its_devices(table, local, compare_work):
    work, seen = compare_work("H200", 7), []
    together = threading.Barrier(3, timeout=10)
    compared = []

    def compare(device, job, on_block):
        compared.append(device)
        if len(compared) <= 3:
            together.wait()  # all three are at it
        return right(None, job).comparisons

    pool = local(compare)
    pool.compare([work], seen.append)

    assert [kind.devices for kind in pool.kinds] == [3]
    assert set(compared) == {"H200 0", "H200 1", "H200 2"}
    assert states_of(table, work) == ["done"] * 7
    assert sorted(seen) == sorted(job.id for job in jobs_of(table, work))
    with table.database.session() as session:
        outcomes = queries.comparison_outcomes(session, work.run)
    assert {outcome["device"]["uuid"] for outcome in outcomes.values()} == set(compared)


def test_local_pool_compares_on_two_gpus_beside_idle_others(table, local, mixed_work):
    work, now, seen = mixed_work("H200"), set(), []

    def compare(device, job, on_block):
        now.add(device)
        time.sleep(0.02)
        seen.append((job.gpus, device, now.copy()))
        now.remove(device)
        return right(None, job).comparisons

    local(compare).compare([work], ignore)

    assert set(states_of(table, work)) == {"done"}
    assert [gpus for gpus, *_ in seen] == sorted(gpus for gpus, *_ in seen)
    assert all(
        (device, beside) == ("H200 0", {device}) for gpus, device, beside in seen if gpus == 2
    )


@pytest.mark.parametrize("stopped", ["H200 0", "H200 1"])
@pytest.mark.parametrize("reason", [KeyboardInterrupt, ZeroDivisionError])
def test_local_devices_stop_together(table, local, compare_work, stopped, reason):
    work = compare_work("H200", 6)
    together = threading.Barrier(3, timeout=10)

    def compare(device, job, on_block):
        together.wait()
        if device == stopped:
            raise reason
        for _ in range(1000):
            on_block(job.cases[0], None)
            time.sleep(0.01)
        raise AssertionError("it was not stopped")

    with pytest.raises(reason):
        local(compare).compare([work], ignore)

    assert states_of(table, work) == ["queued"] * 6
    assert {job.deaths for job in jobs_of(table, work)} == {0}


def test_local_comparison_that_fails_on_a_device_goes_to_another(table, local, compare_work):
    work = compare_work("H200", 3)

    def compare(device, job, on_block):
        if device == "H200 1":
            time.sleep(0.05)
            raise InfrastructureError("fell off the bus")
        return right(None, job).comparisons

    local(compare).compare([work], ignore)

    assert states_of(table, work) == ["done"] * 3


def test_second_coordinator_waits_for_leased_comparisons(table, gpus, compare_work, monkeypatch):
    """Here the first one is dead, so the second one takes its job when the lease has expired."""
    work = compare_work("H200", 2)

    def killed(member, job):
        raise SystemExit

    first = table.coordinator(gpus({"H200": 1}, compares=killed))
    monkeypatch.setattr(first, "_abort", lambda: None)
    with pytest.raises(SystemExit):
        first.compare([work], ignore)
    workers = gpus({"H200": 1}, compares=right)

    table.coordinator(workers).compare([work], ignore)

    assert states_of(table, work) == ["done"] * 2
    assert len(workers.started) == 2


def test_stopped_comparison_returns_its_lease(table, gpus, compare_work):
    work = compare_work("H200", 3)

    def stop(job):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table.coordinator(gpus({"H200": 2}, compares=right)).compare([work], stop)

    assert "leased" not in states_of(table, work)


def test_workers_are_replaced_between_measuring_and_comparing(table, gpus, compare_work, a_case):
    workers = gpus({"H200": 2}, compares=right)
    coordinator = table.coordinator(workers)
    measured, compared = table.work("H200", [a_case(m) for m in (1, 2, 3)]), compare_work("H200", 2)

    coordinator.carry_out([measured])
    coordinator.compare([compared], ignore)
    before = {member for member, _ in workers.started}
    coordinator.carry_out([measured])

    assert workers.used == ["compare", "measure"]
    assert before.isdisjoint(workers._members)
    with table.database.session() as session:
        ended = [worker for worker in queries.workers(session) if worker.state == "lost"]
    assert ended == []  # they were not needed any more


@pytest.fixture
def comparer(table):
    """comparer(workers): compares on these workers, by jobs of a run."""

    @contextmanager
    def opened(workers):
        coordinator = table.coordinator(workers)
        pool = SimpleNamespace(compare=coordinator.compare)
        kind = Kind("H200", "cuda", (9, 0), 2, 2)
        with comparing_run(table.database, pool, kind, COMMIT, Path("/nowhere"), "gate") as made:
            yield made

    return opened


def test_comparison_of_a_command_uses_all_devices_of_its_kind(table, gpus, comparer, a_case):
    workers, cases = gpus({"H200": 2}, compares=right), tuple(a_case(m) for m in range(1, 6))
    states = []

    with comparer(workers) as made:
        job = CompareJob(BASE, HEAD, cases)
        results = made.compare(job, on_progress=lambda s: states.append((s.done, s.expected)))
        again = made.compare(job)

    assert sorted(r.case.key for r in results) == sorted(c.key for c in cases)
    assert len(again) == len(cases)
    assert states == [(0, 2), (1, 2), (2, 2)]
    assert {made.devices[case.key].uuid for case in cases} == {"H200 0", "H200 1"}
    with table.database.session() as session:
        [run] = [run for run in queries.runs(session) if run.suite == "gate"]
        jobs = queries.jobs_of(session, run.uuid, kind="compare")
    assert (run.status, [job.state for job in jobs]) == ("complete", ["done"] * 4)


def test_budget_of_a_command_is_that_of_all_its_parts(table, gpus, comparer, a_case, clock):
    budgets = []

    def slow(member, job):
        clock.now += 40
        return right(member, job)

    workers = gpus({"H200": 1}, compares=slow)
    compare = workers.compare

    def recorded(member, job, repository, rules=None):
        budgets.append(rules.budget_s)
        compare(member, job, repository, rules)

    workers.compare = recorded
    with comparer(workers) as made:
        job = CompareJob(BASE, HEAD, tuple(a_case(m) for m in (1, 2)))
        made.compare(job, rules=InterleaveRules(budget_s=60))
        made.compare(job, rules=InterleaveRules(budget_s=30))

    assert budgets == pytest.approx([60, 20, 30, 0], abs=2)


def test_code_that_cannot_be_compared_ends_a_command(gpus, comparer, a_case):
    workers = gpus({"H200": 1}, compares=lambda m, job: Compared(error=BrokenRevisionError("bad")))

    with (
        comparer(workers) as made,
        pytest.raises(BrokenRevisionError, match="bad"),
    ):
        made.compare(CompareJob(BASE, HEAD, (a_case(),)))


def test_case_without_a_result_has_no_data_and_a_reason(gpus, comparer, a_case):
    def one_fails(member, job):
        if job.cases[0].gemm.m == 2:
            return Compared(error=InfrastructureError("no git here"))
        return right(member, job)

    with comparer(gpus({"H200": 2}, compares=one_fails)) as made:
        job = CompareJob(BASE, HEAD, tuple(a_case(m) for m in (1, 2)))
        results = {result.case.gemm.m: result for result in made.compare(job)}

    assert results[2].confirmation.verdict is Verdict.NO_DATA
    assert "no git here" in results[2].detail
    assert results[1].confirmation.verdict is not Verdict.NO_DATA


def test_comparison_of_a_command_without_devices_fails(gpus, comparer, a_case):
    with (
        comparer(gpus({}, compares=right)) as made,
        pytest.raises(InfrastructureError, match="no H200 came"),
    ):
        made.compare(CompareJob(BASE, HEAD, (a_case(),)))


@pytest.mark.parametrize(
    ("error", "state"),
    [(UsageError("no such commit"), "refused"), (DeviceError("no GPU"), "quarantined")],
)
def test_only_errors_of_the_code_refuse_a_comparison(table, gpus, compare_work, error, state):
    work = compare_work("H200", 1)

    table.coordinator(gpus({"H200": 1}, compares=lambda m, job: Compared(error=error))).compare(
        [work], ignore
    )

    assert states_of(table, work) == [state]


def test_outcome_has_no_numbers_that_json_lacks(a_case, gpus):
    device = next(iter(gpus({"H200": 1})._members.values())).worker.device

    json.dumps(outcome_data([comparison_of(a_case())], device), allow_nan=False)


def test_kind_is_not_given_up_while_its_workers_start(table, gpus, compare_work, clock):
    work = compare_work("H200", 1)
    workers = gpus({}, compares=right)
    workers.arriving, began, poll = 1, clock.now, workers.poll

    def late(timeout_s):
        if clock.now > began + 10 and workers.arriving:  # `device` is three seconds
            workers.arriving = 0
            workers._join("H200 0", gpu="H200")
        return poll(timeout_s)

    workers.poll = late
    table.coordinator(workers).compare([work], ignore)

    assert states_of(table, work) == ["done"]


def test_kind_is_not_given_up_while_another_coordinator_has_it(table, gpus, compare_work):
    work = compare_work("H200", 2)
    first, second = jobs_of(table, work)
    # Of real time, so that it is current whatever the clock here says.
    with table.database.session() as session:
        now = database_time(session)
        claim_jobs(session, {first.id: "theirs"}, until=now + timedelta(seconds=2), at=now)
    states = []

    def poll(timeout_s):
        table.clock.now += timeout_s
        if table.clock.now > 1000 + 8:  # `device` is three seconds
            states.append(states_of(table, work))
            done = ComparisonOutcome("done", outcome={})
            with table.database.session() as session:
                finish_comparisons(session, {first.id: done, second.id: done})
        return []

    workers = gpus({})
    workers.poll = poll
    table.coordinator(workers).compare([work], ignore)

    assert states[0] == ["leased", "queued"]
    assert states_of(table, work) == ["done"] * 2
