"""Bisection requests: serving, cancellation, retries and leases."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from serving import dies, lapse, served
from sqlalchemy import select

from flexq_bench.db import queries
from flexq_bench.db.requests import cancel_request
from flexq_bench.db.tables import Request
from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.fleet import request_worker
from flexq_bench.fleet.requests import (
    MAX_COMPARISONS,
    Bisection,
    bisect_request,
    bisection_of,
    submit,
)
from flexq_bench.fleet.retry_policy import MAX_DEATHS
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.errors import WorkloadError

COMMITS = [f"{number:040x}" for number in range(1, 9)]
KEY = "flexq-w6a6 gemm cold m1n256k256"


@pytest.fixture
def bisected(database, a_pool, commit, compared, monkeypatch, tmp_path):
    """bisected(culprit): serve a bisection of COMMITS, of which that one made the case slower."""
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(request_worker, "commits_between", lambda *_: COMMITS[1:])
    monkeypatch.setattr(request_worker, "is_published", lambda _, sha: sha == COMMITS[-1])
    monkeypatch.setattr(
        request_worker, "resolve_pair", lambda _, *ends: [SimpleNamespace(commit=e) for e in ends]
    )
    pool = a_pool(None)
    pool.check = lambda cases: None

    def bisect(culprit, compare=None):
        def compare_two(job, work, **_):
            assert (job.base, [case.key for case in job.cases]) == (COMMITS[0], [KEY])
            # A step asks for its side only.
            assert (work.rules.suffices is None) == (job.head == COMMITS[-1])
            return [compared("flexq-w6a6", 1.05 if job.head >= culprit else 1.0)]

        pool.compare_here = compare or compare_two
        wanted = bisection_of({"case": KEY, "good": COMMITS[0], "bad": COMMITS[-1]})
        with database.session() as session:
            request = bisect_request(session, wanted, requester="ada", gpu="A CPU")
            submit(session, request)
        return request, served(database, pool, commit)

    bisect.pool = pool
    return bisect


def test_requested_bisection_names_the_commit(database, bisected):
    request, done = bisected(COMMITS[5])

    assert (request.cases, done.state, done.run) == (MAX_COMPARISONS, "done", None)
    assert done.detail == f"{COMMITS[5][:10]} made it 5.0 % slower"
    with database.session() as session:
        assert [row.detail for row in queries.requests(session)] == [done.detail]


def test_bisection_of_unmerged_commits_is_refused(database, bisected, monkeypatch):
    monkeypatch.setattr(request_worker, "is_published", lambda *_: False)

    _, done = bisected(COMMITS[5])

    assert (done.state, done.detail) == (
        "failed",
        "0000000000 is in no branch and no tag here: a request measures what was merged",
    )


def test_bisection_is_cancelled_between_comparisons(database, bisected, compared):
    asked = []

    def compare(job, work, **_):
        asked.append(job.head)
        with database.session() as session:
            [row] = queries.requests(session)
            cancel_request(session, row.uuid, person="bob", at=datetime.now(UTC))
        return [compared("flexq-w6a6", 1.05)]

    _, done = bisected(COMMITS[5], compare)

    assert (done.state, len(asked)) == ("cancelled", 1)
    with database.session() as session:
        [row] = queries.requests(session)
    assert row.detail == "cancelled by bob"


def test_bisection_fails_after_three_servers_died(database, bisected, commit, compared):
    """Of the commit that does it: the answer of the first comparison is in the journal."""

    def killed(job, work, **_):
        if job.head != COMMITS[-1]:
            raise SystemExit
        return [compared("flexq-w6a6", 1.05)]

    with pytest.raises(SystemExit):
        bisected(COMMITS[5], killed)
    lapse(database)
    for _ in range(2):
        dies(database, bisected.pool, commit)

    over = served(database, bisected.pool, commit)
    assert (over.state, over.detail) == (
        "failed", "quarantined: 3 workers ended while they measured it"
    )  # fmt: skip


def test_bisection_returns_to_the_queue_if_the_machine_fails(database, bisected, commit, compared):
    def fails(job, work, **_):
        if job.head == COMMITS[-1]:
            return [compared("flexq-w6a6", 1.05)]
        raise InfrastructureError("the GPU fell off the bus")

    for _ in range(MAX_DEATHS + 1):
        with pytest.raises(InfrastructureError, match="fell off the bus; the search stops at"):
            bisected(COMMITS[5], fails) if _ == 0 else served(database, bisected.pool, commit)

    bisected.pool.compare_here = lambda job, work, **_: [
        compared("flexq-w6a6", 1.05 if job.head >= COMMITS[5] else 1.0)
    ]
    assert served(database, bisected.pool, commit).detail.startswith(COMMITS[5][:10])


def test_lease_is_renewed_while_a_comparison_makes_progress(
    database, bisected, commit, compared, eventually, quick
):
    """Longer than the lease, which a server that dies leaves behind."""
    assert timedelta(minutes=5) > request_worker.LEASE > 4 * timedelta(seconds=20)
    meanwhile = []

    def end_of_lease():
        with database.session() as session:
            return session.scalar(select(Request.lease_until))

    def compare(job, work, **_):
        if not meanwhile:
            first = end_of_lease()
            eventually(lambda: end_of_lease() > first)
            meanwhile.append(served(database, bisected.pool, commit))
        return [compared("flexq-w6a6", 1.05 if job.head >= COMMITS[5] else 1.0)]

    _, done = bisected(COMMITS[5], compare)

    assert (meanwhile, done.state) == ([None], "done")


def test_a_comparison_that_hangs_is_anybodys_in_the_end(
    database, bisected, commit, compared, monkeypatch, quick
):
    monkeypatch.setattr(request_worker, "LEASE", timedelta(seconds=0.1))
    monkeypatch.setattr(request_worker, "MAX_COMPARISON_S", 0.1)
    meanwhile = []

    def compare(job, work, **_):
        if not meanwhile:
            meanwhile.append(None)
            time.sleep(0.5)
            meanwhile.append(served(database, bisected.pool, commit))
        return [compared("flexq-w6a6", 1.05 if job.head >= COMMITS[5] else 1.0)]

    bisected(COMMITS[5], compare)

    assert meanwhile[1].state == "done"


def test_bisection_of_unmeasurable_commits_ends(bisected, compared, monkeypatch):
    monkeypatch.setattr(request_worker, "MAX_COMPARISONS", 3)
    asked = []

    def compare(job, work, **_):
        asked.append(job.head)
        if job.head != COMMITS[-1]:
            raise UsageError("it does not build")
        return [compared("flexq-w6a6", 1.05)]

    _, done = bisected(COMMITS[5], compare)

    assert len(asked) == 3
    assert done.detail.startswith(
        "one of 7 commits, 0000000000 to 0000000000, made it 5.0 % slower"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"good": "HEAD"}, "'HEAD' is not the full id of a commit"),
        ({"bad": "--upload-pack=x"}, "is not the full id"),
        ({"bad": COMMITS[0]}, "the same commit"),
        ({"case": "@/etc/passwd"}, "not the key of a case"),
        ({"repository": "/"}, "no field of a bisection 'repository'"),
    ],
)
def test_a_bisection_of_anything_else_is_refused(changes, message):
    wanted = Bisection(Case.from_key(KEY), COMMITS[0], COMMITS[-1]).as_data()

    with pytest.raises((UsageError, WorkloadError), match=message):
        bisection_of(wanted | changes)
