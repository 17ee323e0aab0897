from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from flexq_bench.db import queries
from flexq_bench.db.errors import LockedError
from flexq_bench.db.fleet import drain
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.fleet import local_pool, pool_choice
from flexq_bench.fleet.pool import Work
from flexq_bench.measure import Measured
from flexq_bench.runs.lifecycle import new_run, open_run
from flexq_bench.runs.worker import Worker

COMMIT = CommitInfo("a" * 40, None, 1, dirty=False)
OK = Measured("ok", "", 0, 1, "normal-v1", median_us=20.0, n_samples=50)
WORKER = Worker(DeviceInfo("cpu-1", "A CPU", "cpu"), {"host": "here"}, None, 42)


def the_worker(database):
    with database.session() as session:
        (worker,) = queries.workers(session)
    return worker


def test_registered_worker_is_idle_and_then_stopped(database):
    with local_pool.registered_worker(database, WORKER):
        here = the_worker(database)
        assert (here.state, here.gpu, here.pid) == ("idle", "A CPU", 42)

    assert the_worker(database).state == "stopped"


def test_registered_worker_sends_heartbeats(database, eventually):
    with local_pool.registered_worker(database, WORKER, every=timedelta(milliseconds=20)):
        first = the_worker(database).heartbeat_at
        eventually(lambda: the_worker(database).heartbeat_at != first)


def test_locked_database_does_not_end_heartbeats(database, monkeypatch, caplog, eventually):
    real, calls = local_pool.beat, []

    def busy_once(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            raise LockedError("busy")
        real(*args, **options)

    monkeypatch.setattr(local_pool, "beat", busy_once)

    with local_pool.registered_worker(database, WORKER, every=timedelta(milliseconds=20)):
        eventually(lambda: len(calls) >= 2)
    assert "busy" in caplog.text


def test_case_that_another_process_stored_is_not_measured_again(database, a_case):
    cases, measured = (a_case(1), a_case(2)), []
    measurer = SimpleNamespace(worker=WORKER, in_order=lambda cases: cases)
    measurer.measure = lambda case: measured.append(case) or OK
    pool = local_pool.LocalPool(database, measurer, "cpu")

    with open_run(database, new_run("made", "manual", [c.key for c in cases]), COMMIT) as run:
        for planned in (cases[:1], cases):  # by the process that had the device, and by this one
            pool.measure([Work(run, "A CPU", planned)], lambda record: None)

    assert measured == [*cases]


@pytest.mark.parametrize(
    ("device", "name", "others"),
    [(None, "cuda", ["cuda:1"]), ("cuda:0", "cuda:0", []), (None, "cpu", [])],
)
def test_comparisons_use_gpus_that_are_not_drained(database, monkeypatch, device, name, others):
    kinds = {"cuda:0": "H200", "cuda:1": "H200", "cuda:2": "A100", "cuda:3": "H200", "cpu": "A CPU"}
    present = [(each, DeviceInfo(f"id {each}", kind, "cuda")) for each, kind in kinds.items()]
    monkeypatch.setattr(pool_choice, "local_devices", lambda: present)
    monkeypatch.setattr(pool_choice, "device_info", lambda _: present[0][1])
    with database.session() as session:
        drain(session, "id cuda:3", reason="hot", person="Ada", at=datetime.now(UTC))

    options = pool_choice.PoolOptions(device=device)

    assert pool_choice._others_of_its_kind(database, name, options) == others
