"""Coordination of jobs: every case ends with a result or a reason, after any failure."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from threading import Thread

import pytest
from sqlalchemy import text

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.errors import FileMovedError, UnreachableError
from flexq_bench.db.fleet import drain
from flexq_bench.db.records import CommitInfo
from flexq_bench.db.tuning import ChoiceInfo
from flexq_bench.errors import CancelledError, FlexqError, InfrastructureError
from flexq_bench.fleet.ray_pool import RayPool
from flexq_bench.fleet.timeouts import Times
from flexq_bench.fleet.workers import Event, Lost, Report
from flexq_bench.measure import Measured
from tests.fleet.conftest import Clock, ScriptedWorkers, Table

COMMIT = CommitInfo("a" * 40, None, 1, dirty=False)
OK = Measured("ok", "", 0, 1, "normal-v1", median_us=20.0, n_samples=50)


def test_every_case_is_measured_once_on_its_kind_of_gpu(table, gpus, a_case):
    workers = gpus({"H200": 2, "A100": 1})
    works = [table.work(gpu, [a_case(m) for m in range(1, 6)]) for gpu in ("H200", "A100")]

    table.coordinator(workers).carry_out(works)

    for work in works:
        assert table.received(work) == sorted(case.key for case in work.cases)
        assert set(table.states(work).values()) == {"done"}
    gpus = {member: workers._members[member].gpu for member, _ in workers.started}
    assert sorted(gpus.values()) == ["A100", "H200", "H200"]
    assert sum(gpus[member] == "A100" for member, _ in workers.started) == 5


def test_case_with_three_worker_deaths_is_quarantined(table, gpus, a_case):
    deadly, harmless = a_case(1), [a_case(m) for m in (2, 3, 4)]
    workers = gpus(
        {"H200": 1}, lambda member, case: Lost(member.uuid, "killed") if case == deadly else OK
    )
    work = table.work("H200", [deadly, *harmless])

    table.coordinator(workers).carry_out([work])

    assert [case for _, case in workers.started].count(deadly) == 3
    assert table.states(work) == {
        deadly.key: "quarantined",
        **dict.fromkeys([c.key for c in harmless], "done"),
    }
    with table.database.session() as session:
        records = {r.case: r for r in queries.run_records(session, work.run.info.uuid)}
        [(run, job)] = queries.quarantined_jobs(session)
    assert records[deadly.key].status == "failed"
    assert "quarantined: 3 workers ended" in records[deadly.key].detail
    assert (run, job.reason) == (work.run.info.uuid, "killed")


@pytest.mark.parametrize("replaces", [True, False])
def test_memory_query_moves_to_another_worker_after_a_loss(table, gpus, a_case, replaces):
    case = a_case()
    coordinator = table.coordinator(gpus({"H200": 2}, replaces=replaces, lost_in_memory_query=1))
    coordinator.gather()

    assert coordinator.memory_obstacles("H200", [case]) == {case.key: "too large"}
    assert len(coordinator.workers) == 1 + replaces
    assert coordinator.memory_obstacles("A100", [case]) == {}


def test_memory_query_fails_after_three_lost_workers(table, gpus, a_case):
    coordinator = table.coordinator(gpus({"H200": 1}, lost_in_memory_query=3))
    coordinator.gather()

    with pytest.raises(InfrastructureError, match="did not answer: killed"):
        coordinator.memory_obstacles("H200", [a_case()])


def test_lost_node_does_not_count_against_the_case(table, gpus, a_case):
    answers = iter([Lost("w1", "the node died", blameless=True)] * 5)
    workers = gpus({"H200": 1}, lambda member, case: next(answers, OK))
    work = table.work("H200", [a_case()])

    table.coordinator(workers).carry_out([work])

    assert table.states(work) == {a_case().key: "done"}


def test_kind_that_joins_meanwhile_measures_no_case_of_others(table, gpus, a_case):
    def script(member, case):
        if len(workers.started) == 1:
            workers._join("B200 0", gpu="B200")
        return OK

    workers = gpus({"H200": 1}, script)
    work = table.work("H200", [a_case(m) for m in range(1, 4)])
    coordinator = table.coordinator(workers)
    coordinator.carry_out([work])

    assert len(table.received(work)) == 3
    assert {ready.gpu for ready in coordinator.workers} == {"H200", "B200"}
    assert len({member for member, _ in workers.started}) == 1


def test_devices_without_jobs_are_given_back_while_another_is_missing(table, gpus, a_case):
    workers = gpus({"H200": 1, "B200": 1})
    give_back = workers.give_back

    def other_coordinator_ends(member):
        give_back(member)
        if len(workers.given_back) == 2:  # it waited for both and holds the A100
            workers._join("A100 0", gpu="A100")

    workers.give_back = other_coordinator_ends
    works = [table.work(gpu, [a_case(1), a_case(2)]) for gpu in ("H200", "A100")]
    coordinator = table.coordinator(workers)

    coordinator.carry_out(works)

    assert all(set(table.states(work).values()) == {"done"} for work in works)
    assert {ready.gpu for ready in coordinator.workers} == {"H200", "B200", "A100"}
    coordinator.gather()
    assert workers.given_back == {}
    assert len(coordinator.workers) == 3


def test_device_given_back_is_taken_for_jobs_that_return(table, gpus, a_case):
    answers = iter([Lost("w1", "the node died", blameless=True)])
    workers = gpus({"H200": 1}, lambda member, case: next(answers, OK), replaces=False)
    give_back, works = workers.give_back, [table.work(gpu, [a_case(1)]) for gpu in ("H200", "A100")]

    def joined(member):
        give_back(member)
        workers._join("H200 0", gpu="H200")
        workers._join("A100 0", gpu="A100")

    workers.give_back = joined
    workers._join("B200 0", gpu="B200")

    table.coordinator(workers).carry_out(works)

    assert all(set(table.states(work).values()) == {"done"} for work in works)


class SharingWorkers(ScriptedWorkers):
    """Workers on devices that coordinators get in the order of their requests, one at a time.

    queues: of the coordinators' workers, by device.
    """

    def __init__(self, queues: dict[str, list[SharingWorkers]], clock: Clock) -> None:
        self.queues = queues
        super().__init__({}, lambda member, case: OK, clock)
        self._request(queues)

    def _request(self, devices: Iterable[str]) -> None:
        for device in devices:
            self.queues[device].append(self)
            self.arriving += 1
            self.blocked += 1

    def poll(self, timeout_s: float) -> Sequence[Event]:
        present = {member.device for member in self._members.values()}
        for device in self.queues.keys() - present:
            if self.queues[device][:1] == [self]:
                self._join(device, gpu=device.partition(" ")[0])
                self.arriving -= 1
                self.blocked -= 1
        if not self._events:
            time.sleep(timeout_s / 100)
        return super().poll(timeout_s)

    def give_back(self, member: str) -> None:
        super().give_back(member)
        self.queues[self.given_back[member].device].remove(self)

    def take_back(self, workers: Collection[str]) -> None:
        self._request([self.given_back.pop(uuid).device for uuid in workers])

    def end_all(self) -> None:
        for member in self._members.values():
            self.queues[member.device].remove(self)

    def __eq__(self, other: object) -> bool:
        return self is other


@pytest.mark.parametrize("count", [2, 3])
def test_coordinators_on_the_same_devices_do_not_block_each_other(tmp_path, a_case, count):
    queues = {"A100 0": [], "H200 0": [], "H200 1": []}
    sharing = [SharingWorkers(queues, Clock()) for _ in range(count)]
    for number, queue in enumerate(queues.values()):  # each is first on another device
        queue[:] = queue[number % count :] + queue[: number % count]
    states, planned = [], []

    def carry_out(workers, path):
        with open_database(str(path)) as database:
            table = Table(database, workers.clock)
            coordinator = table.coordinator(workers)
            coordinator.gather()
            kinds = sorted({ready.gpu for ready in coordinator.workers})
            works = [table.work(gpu, [a_case(1), a_case(2)]) for gpu in kinds]
            planned.extend(coordinator.memory_obstacles(gpu, [a_case(1)]) for gpu in kinds)
            coordinator.carry_out(works)
            workers.end_all()
            states.extend(state for work in works for state in table.states(work).values())

    threads = [
        Thread(target=carry_out, args=(workers, tmp_path / f"{i}.sqlite"), daemon=True)
        for i, workers in enumerate(sharing)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert states == ["done"] * count * 4
    assert planned == [{a_case(1).key: "too large"}] * count * 2


def test_devices_are_kept_while_further_workers_start(table, gpus, clock):
    workers = gpus({}, arriving=5)
    poll = workers.poll

    def joins(timeout_s):
        clock.now += 60
        workers._join(f"H200 {workers.arriving}", gpu="H200")
        workers.arriving -= 1
        return poll(timeout_s)

    workers.poll = joins
    coordinator = table.coordinator(workers)
    coordinator.gather()

    assert len(coordinator.workers) == 5
    assert workers.given_back == {}


def test_worker_of_a_hanging_case_is_replaced(table, gpus, a_case):
    slow = a_case(7)
    workers = gpus({"H200": 1}, lambda member, case: None if case == slow else OK)
    work = table.work("H200", [slow, a_case(1)])

    table.coordinator(workers).carry_out([work])

    assert table.states(work) == {slow.key: "quarantined", a_case(1).key: "done"}
    assert len(workers.ended) == 3
    assert workers.ended[0][1].startswith("no result after")


def test_results_are_kept_while_the_database_is_unavailable(table, gpus, a_case, monkeypatch):
    work = table.work("H200", [a_case(m) for m in range(1, 9)])
    stored = []
    coordinator = table.coordinator(gpus({"H200": 2}), stored.append)
    session, away = table.database.session, iter(range(20))

    @contextmanager
    def flaky():
        # After two results it is gone for a while.
        if len(stored) >= 2 and next(away, None) is not None:
            raise UnreachableError("it is gone")
        with session() as opened:
            yield opened

    monkeypatch.setattr(table.database, "session", flaky)
    coordinator.carry_out([work])

    assert next(away, None) is None
    assert sorted(record.case for record in stored) == sorted(case.key for case in work.cases)
    assert table.received(work) == sorted(case.key for case in work.cases)


def test_unavailable_database_is_waited_for_at_the_start(table, gpus, a_case, monkeypatch):
    work = table.work("H200", [a_case()])
    coordinator = table.coordinator(gpus({"H200": 1}))
    session, away = table.database.session, iter(range(3))

    def gone_at_first():
        if next(away, None) is not None:
            raise UnreachableError("it is gone")
        return session()

    monkeypatch.setattr(table.database, "session", gone_at_first)
    coordinator.carry_out([work])

    assert table.received(work) == sorted(case.key for case in work.cases)


def test_long_outage_of_the_database_ends_the_work(table, gpus, a_case, monkeypatch):
    work = table.work("H200", [a_case()])
    coordinator = table.coordinator(gpus({"H200": 1}))
    monkeypatch.setattr(coordinator._buffer, "_write", _gone)

    with pytest.raises(InfrastructureError, match="continue with --resume"):
        coordinator.carry_out([work])


def _gone(*arguments):
    raise UnreachableError("it is gone")


def test_another_coordinator_continues_after_a_kill(table, gpus, a_case, monkeypatch):
    work = table.work("H200", [a_case(m) for m in range(1, 9)])
    answers = iter([OK, OK, OK, SystemExit()])

    def until_killed(member, case):
        answer = next(answers)
        if isinstance(answer, SystemExit):
            raise answer
        return answer

    killed = table.coordinator(gpus({"H200": 1}, until_killed))
    monkeypatch.setattr(killed, "_abort", lambda: None)  # SIGKILL leaves no time for it
    with pytest.raises(SystemExit):
        killed.carry_out([work])
    assert sorted(table.states(work).values()) == ["done"] * 3 + ["leased"] + ["queued"] * 4
    workers = gpus({"H200": 1})
    # What the dead one holds is anybody's when its lease runs out, by the database's clock.
    with table.database.session() as session:
        session.connection().exec_driver_sql("UPDATE job SET lease_until = '2020-01-01 00:00:00'")

    table.coordinator(workers).carry_out([work])

    assert len(workers.started) == 5
    assert table.received(work) == sorted(case.key for case in work.cases)


def test_stopping_returns_leased_jobs(table, gpus, a_case):
    work = table.work("H200", [a_case(m) for m in range(1, 5)])

    def take_back(record):
        raise CancelledError("taken back")

    workers = gpus({"H200": 2})
    coordinator = table.coordinator(workers, take_back)
    with pytest.raises(CancelledError):
        coordinator.carry_out([work])
    assert "leased" not in table.states(work).values()

    coordinator._on_record = lambda record: None
    coordinator.carry_out([work])  # the workers' answers to what was stopped change nothing

    assert table.received(work) == sorted(case.key for case in work.cases)


def test_cases_without_a_gpu_are_reported(table, gpus, a_case):
    works = [table.work(gpu, [a_case(1), a_case(2)]) for gpu in ("H200", "A100")]

    table.coordinator(gpus({"H200": 1})).carry_out(works)

    assert set(table.states(works[0]).values()) == {"done"}
    with table.database.session() as session:
        jobs = queries.jobs_of(session, works[1].run.info.uuid)
    assert {(job.state, job.reason) for job in jobs} == {("no-device", "no A100 came within 3 s")}


def test_longest_expected_job_comes_first(table, gpus, a_case):
    workers = gpus({"H200": 1})
    shapes = [a_case(m, n) for n in (256, 512) for m in (1, 2)]
    work = table.work("H200", shapes, expected=[1.0, 2.0, 5.0, 9.0])

    table.coordinator(workers).carry_out([work])

    assert [(case.gemm.n, case.gemm.m) for _, case in workers.started] == [
        (512, 2),
        (512, 1),
        (256, 2),
        (256, 1),
    ]


def test_last_job_of_a_shape_stays_with_its_worker(table, gpus, a_case):
    workers = gpus({"H200": 2})
    cases = [a_case(m, n) for m, n in ((1, 256), (2, 256), (3, 256), (1, 512), (2, 512))]
    work = table.work("H200", cases, expected=[0.5, 0.5, 0.5, 0.9, 0.9])

    table.coordinator(workers).carry_out([work])

    by_shape = {n: {who for who, case in workers.started if case.gemm.n == n} for n in (256, 512)}
    assert [len(workers) for workers in by_shape.values()] == [1, 1]


@pytest.mark.parametrize(
    ("joins", "asked", "says"),
    [
        ("H200", (), ""),
        ("H200", ("H*",), ""),
        ("A100", ("H*",), "no GPU 'H*': there is A100"),
        ("", (), "it has no devices"),
    ],
)
def test_nodes_that_join_late_are_waited_for(database, gpus, monkeypatch, joins, asked, says):
    workers, clock = gpus({}), itertools.count()
    pool = RayPool(database, workers, COMMIT, Times(), gpus=asked)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "sleep", lambda _: joins and workers._join(f"{joins} 0", gpu=joins))

    if says:
        with pytest.raises(FlexqError, match=re.escape(says)):
            pool.gather(5)
        assert next(clock) > 5
    else:
        pool.gather(5)
        assert [(kind.gpu, kind.devices) for kind in pool.kinds] == [("H200", 1)]


def test_repetitions_are_spread_over_the_gpus_of_a_kind(table, gpus, a_case):
    workers = gpus({"H200": 3})
    cases = [a_case(m) for m in range(1, 5)]
    work = table.work("H200", cases, repeat=3)

    table.coordinator(workers).carry_out([work])

    for case in cases:
        devices = {member for member, started in workers.started if started == case}
        assert len(devices) == 3
    assert len(table.received(work)) == 12


def test_tuning_choice_is_sent_once_to_other_workers(table, gpus, a_case):
    choice = ChoiceInfo({"gpu": "H200", "software": "software", "kernel": "k"}, {"block_n": 64})
    first = iter([Report(OK, (choice,))])
    workers = gpus({"H200": 1}, lambda member, case: next(first, OK))

    table.coordinator(workers).carry_out([table.work("H200", [a_case(m) for m in (1, 2, 3)])])
    later = gpus({"H200": 1})
    table.coordinator(later).carry_out([replace_gpu(table, a_case)])

    assert [choices for _, choices in workers.sent_choices] == [(), (choice,), ()]
    assert later.sent_choices[0][1] == (choice,)


def replace_gpu(table, a_case):
    work = table.work("H200", [a_case(9)])
    return replace(work, cases=[a_case(9)])


def test_workers_are_stored_in_the_database(table, gpus, a_case):
    coordinator = table.coordinator(gpus({"H200": 1}))
    coordinator.carry_out([table.work("H200", [a_case(1), a_case(2)])])
    coordinator.mark_stopped()

    with table.database.session() as session:
        [worker] = queries.workers(session)
    assert (worker.gpu, worker.state, worker.finished) == ("H200", "stopped", 2)


def test_results_are_kept_if_the_database_file_was_deleted(table, gpus, a_case):
    work = table.work("H200", [a_case(m) for m in (1, 2, 3)])

    def delete(record):
        table.database.path.unlink()

    with pytest.raises(FileMovedError):
        table.coordinator(gpus({"H200": 1}), delete).carry_out([work])

    with table.database.opened_file_session() as session:
        for write in work.run.unwritten:
            write(session)
        records = list(queries.run_records(session, work.run.info.uuid))
    assert len(records) == 2  # the first, and the one that was measured meanwhile


class LostAcknowledgement:
    """A database whose server commits one transaction with a lease in it and says nothing."""

    def __init__(self, database):
        self._database, self.lost = database, 0

    def __getattr__(self, name):
        return getattr(self._database, name)

    @contextmanager
    def session(self):
        with self._database.session() as session:
            yield session
            leased = session.execute(text("SELECT count(*) FROM job WHERE state = 'leased'"))
            if leased.scalar() and not self.lost:
                session.commit()
                self.lost += 1
                raise UnreachableError("the connection was cut")


@pytest.mark.parametrize("count", [1, 3])
def test_lease_with_lost_acknowledgement_is_used_at_once(table, gpus, a_case, count):
    workers = gpus({"H200": 1})
    work = table.work("H200", [a_case(m) for m in range(1, count + 1)])
    table.database = LostAcknowledgement(table.database)
    deadline = time.monotonic() + 10  # of real time: leases are renewed by it

    def poll(timeout_s):
        assert time.monotonic() < deadline, "it waits for a job that its own idle worker holds"
        return type(workers).poll(workers, timeout_s)

    coordinator = table.coordinator(workers)
    workers_poll, workers.poll = workers.poll, poll
    coordinator.carry_out([work])
    workers.poll = workers_poll

    assert table.database.lost == 1
    assert set(table.states(work).values()) == {"done"}
    assert table.received(work) == sorted(case.key for case in work.cases)
    assert len(workers.started) == count


def test_drained_device_gets_no_job_and_others_take_them(table, database, gpus, a_case):
    crew = gpus({"H200": 2})
    work = table.work("H200", [a_case(m) for m in range(1, 5)])
    with database.session() as session:
        drain(session, "H200 0", reason="hot", person="Ada", at=datetime.now(UTC))

    coordinator = table.coordinator(crew)
    coordinator.gather()
    coordinator.carry_out([work])

    devices = {member.uuid: member.device for member in crew._members.values()}
    assert {devices[member] for member, _ in crew.started} == {"H200 1"}
    assert set(table.states(work).values()) == {"done"}


def test_kind_whose_devices_are_drained_leaves_jobs_with_the_reason(table, database, gpus, a_case):
    work = table.work("H200", [a_case(1)])
    with database.session() as session:
        drain(session, "here", reason="moving", person="Ada", at=datetime.now(UTC))

    coordinator = table.coordinator(gpus({"H200": 1}))
    coordinator.gather()
    coordinator.carry_out([work])

    with database.session() as session:
        [job] = queries.jobs_of(session, work.run.info.uuid)
    assert (job.state, job.reason) == ("no-device", "every H200 is drained (moving)")
