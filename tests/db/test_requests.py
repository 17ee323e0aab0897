"""Requests: bounded, served once at a time, and gone on with after a server died."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest

from flexq_bench.db import queries
from flexq_bench.db.errors import LimitError, NotFoundError, RecordError
from flexq_bench.db.requests import (
    Limits,
    RequestInfo,
    add_request,
    cancel_request,
    claim_request,
    finish_request,
    renew_request,
    set_request_run,
)
from flexq_bench.db.store import begin_run

NOW = datetime(2025, 11, 21, 10, tzinfo=UTC)
LEASE = timedelta(minutes=10)
LIMITS = Limits(requests=2, cases=100, cases_of_one=98, requests_of_all=4, cases_of_all=150)


def a_request(number=1, **changes):
    fields = {
        "uuid": str(uuid.UUID(int=number)),
        "kind": "sweep",
        "content": {"m": [1, 2]},
        "requester": "ada",
        "gpu": "",
        "cases": 10,
        "expected_s": None,
        "created_at": NOW + timedelta(seconds=number),
    }
    return RequestInfo(**fields | changes)


def add(session, *requests):
    for request in requests:
        add_request(session, request, limits=LIMITS)


def claim(session, server="s1", gpus=("NVIDIA H200",), at=NOW):
    return claim_request(session, server, gpus, until=at + LEASE, at=at)


def test_requester_s_open_requests_are_limited(session):
    add(session, a_request(1), a_request(2), a_request(3, requester="bob"))

    with pytest.raises(LimitError, match="ada has 2 open requests of 20 cases"):
        add(session, a_request(4))
    with pytest.raises(LimitError, match="may have 2 of 100: 95 more must wait"):
        add(session, a_request(5, requester="bob", cases=95))
    add(session, a_request(1))  # known: changes nothing


def test_request_larger_than_the_limit_is_refused(session):
    with pytest.raises(LimitError, match="this request has 99 cases, and one may have 98"):
        add(session, a_request(1, cases=99))
    for cases in (0, -50):  # would make room for others
        with pytest.raises(RecordError, match="at least one case"):
            add(session, a_request(1, cases=cases))
    assert queries.requests(session) == []


def test_limits_apply_to_all_requesters_together(session):
    add(session, *(a_request(i, requester=f"ada {i}", cases=30) for i in range(1, 4)))

    with pytest.raises(LimitError, match=r"3 requests of 90 cases are open.* 4 of 150: 61 more"):
        add(session, a_request(4, requester="bob", cases=61))
    add(session, a_request(5, requester="bob"))
    with pytest.raises(LimitError, match="4 requests of 100 cases are open, and all requesters"):
        add(session, a_request(6, requester="eve"))
    finish_request(session, a_request(1).uuid, "done", at=NOW)
    add(session, a_request(6, requester="eve"))


def test_unknown_kind_is_refused(session):
    with pytest.raises(RecordError, match="not one of sweep, suite"):
        add(session, a_request(kind="shell"))


def test_oldest_matching_request_is_claimed_by_one_server(session):
    add(session, a_request(1, gpu="NVIDIA A100-SXM4-80GB"), a_request(2))
    first = claim(session)

    assert (first.uuid, first.content, first.run) == (a_request(2).uuid, {"m": [1, 2]}, None)
    assert claim(session, "s2") is None
    assert claim(session, "s2", gpus=("NVIDIA A100-SXM4-80GB",)).uuid == a_request(1).uuid


def test_request_of_a_dead_server_is_claimed_with_its_run(session, build):
    add(session, a_request())
    run = begin_run(session, build.a_run(), build.a_commit())
    set_request_run(session, claim(session).uuid, run.uuid)
    assert renew_request(session, a_request().uuid, "s1", until=NOW + 2 * LEASE)

    assert claim(session, "s2", at=NOW + 1.5 * LEASE) is None
    assert claim(session, "s2", at=NOW + 3 * LEASE).run == run.uuid
    assert not renew_request(session, a_request().uuid, "s1", until=NOW + 9 * LEASE)


def test_cancelled_request_stays_cancelled(session):
    add(session, a_request())
    claim(session)

    cancel_request(session, a_request().uuid, person="bob", at=NOW)

    assert not renew_request(session, a_request().uuid, "s1", until=NOW + LEASE)
    finish_request(session, a_request().uuid, "done", at=NOW)
    row = queries.request_by_uuid_prefix(session, a_request().uuid[:8])
    assert (row.state, row.detail) == ("cancelled", "cancelled by bob")
    with pytest.raises(RecordError, match="cancelled already"):
        cancel_request(session, row.uuid, person="bob", at=NOW)


def test_finished_request_says_how_it_ended(session):
    add(session, a_request(1), a_request(2))
    finish_request(session, a_request(1).uuid, "failed", detail="no kernel 'x'", at=NOW)

    [row] = queries.requests(session, states=("failed",), requester="ada")
    assert (row.detail, row.finished_at, row.run) == ("no kernel 'x'", NOW, None)
    assert [r.uuid for r in queries.requests(session)] == [a_request(2).uuid, a_request(1).uuid]
    with pytest.raises(RecordError, match="not one of done, failed, cancelled"):
        finish_request(session, a_request(2).uuid, "running", at=NOW)
    with pytest.raises(NotFoundError, match="no request begins with 'x'"):
        queries.request_by_uuid_prefix(session, "x")
