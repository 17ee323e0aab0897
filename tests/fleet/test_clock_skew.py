"""Leases by the clock of the database, with hosts whose clocks differ by an hour."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from flexq_bench.db import queries
from flexq_bench.db.fleet import claim_jobs
from flexq_bench.measure import Measured

OK = Measured("ok", "", 0, 1, "normal-v1", median_us=20.0, n_samples=50)
HOUR = timedelta(hours=1)
MODULES = ("coordinator", "write_buffer", "local_pool", "request_worker", "ray_pool")


def host_clock(skew):
    class Skewed(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + skew

    return Skewed


@pytest.fixture
def skewed(monkeypatch):
    """skewed(HOUR): the clock of this host goes an hour fast; the database's stays right."""

    def apply(skew):
        for name in MODULES:
            module = f"flexq_bench.fleet.{name}.datetime"
            monkeypatch.setattr(module, host_clock(skew), raising=False)

    return apply


@pytest.mark.parametrize("skew", [HOUR, -HOUR])
def test_job_of_another_host_is_free_after_its_lease(table, gpus, a_case, skewed, skew):
    work = table.work("H200", [a_case()])
    [job] = [job.id for job in table_jobs(table, work)]
    now, lease = datetime.now(UTC), timedelta(seconds=1.5)
    with table.database.session() as session:
        claim_jobs(session, {job: "elsewhere"}, until=now + lease, at=now)
    skewed(skew)
    workers = gpus({"H200": 1})
    began = []
    workers.script = lambda member, case: began.append(datetime.now(UTC)) or OK
    deadline = now + timedelta(seconds=20)

    def poll(timeout_s):
        assert datetime.now(UTC) < deadline, "it waits for a lease that has run out"
        return type(workers).poll(workers, timeout_s)

    coordinator = table.coordinator(workers)
    workers.poll = poll
    coordinator.carry_out([work])

    [start] = began
    assert start >= now + lease
    assert start - now < timedelta(seconds=10)
    [done] = table_jobs(table, work)
    assert (done.state, done.attempts) == ("done", 2)


def table_jobs(table, work):
    with table.database.session() as session:
        return queries.jobs_of(session, work.run.info.uuid)
