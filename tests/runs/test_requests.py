"""Sweep requests: validation, serving, retries and outages."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from serving import dies, served

from flexq_bench.db import queries
from flexq_bench.db.errors import LimitError, UnreachableError
from flexq_bench.db.requests import RequestInfo, add_request, cancel_request, renew_request
from flexq_bench.errors import InfrastructureError, MeasureError, UsageError
from flexq_bench.fleet import request_worker
from flexq_bench.fleet.requests import (
    LIMITS,
    MAX_CASES,
    checked_request,
    submit,
    sweep_request,
)
from flexq_bench.sweeps.sweep import Sweep, sweep_of
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.operation import operation
from flexq_bench.workloads.suite import Shape

SHAPE = Shape(64, 128, "o_proj", "llama-7b")
SWEEP = Sweep(("flexq-w6a6",), (1, 2), (SHAPE,), ("gemm",), ("hot",))


def ask(database, sweep=SWEEP, requester="ada"):
    with database.session() as session:
        request = sweep_request(session, sweep, requester=requester, backend="cpu")
        submit(session, request)
    return request


NORM = operation("norm_quantize").workload(tokens=1, hidden=256)
OF_NORM = Sweep(("decoder-norm",), (), (), (), ("cold",), (NORM,))


@pytest.mark.parametrize(
    "sweep",
    [SWEEP, replace(SWEEP, shapes=(Shape(288, 96, "Wqkv", ""),), workloads=(NORM,)), OF_NORM],
)
def test_sweep_is_the_same_after_storage(sweep):
    assert sweep_of(sweep.as_data()) == sweep


def test_workloads_of_a_request_are_planned(database):
    request = ask(database, OF_NORM)

    [case] = [c for c in OF_NORM.suite().cases(["decoder-norm"]) if c.kernel == "decoder-norm"]
    assert case.workload == NORM
    assert request.cases == 2  # the empty kernel


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernels": ["__import__('os')"]}, "a kernel is written"),
        ({"kernels": []}, "kernels must be a list of 1 to"),
        ({"m": [0]}, "m must be a whole number from 1"),
        ({"m": [1.5]}, "m must be a whole number"),
        ({"m": [True]}, "m must be a whole number"),
        ({"m": "1:8"}, "m must be a list"),
        ({"shapes": [{"n": 64}]}, "k must be a whole number"),
        ({"shapes": [{"n": 64, "k": 64, "layer": "<b>"}]}, "letters, digits"),
        ({"shapes": [{"n": 64, "k": 64, "model": "gpt-9"}]}, "no model 'gpt-9'"),
        ({"stages": ["rm"]}, "no stage 'rm'"),
        ({"workloads": ["norm_quantize"]}, "name:parameter=value"),
        ({"workloads": ["norm:tokens=1"]}, "no operation 'norm'"),
        ({"workloads": ["norm_quantize:tokens=0,hidden=4"]}, "tokens must be from 1"),
        ({"code": "1"}, "no field of a sweep 'code'"),
    ],
)
def test_unknown_or_out_of_range_values_are_refused(changes, message):
    with pytest.raises((UsageError, WorkloadError), match=message):
        sweep_of(SWEEP.as_data() | changes)


def test_too_large_request_is_refused(database):
    with database.session() as session:
        request = sweep_request(session, SWEEP, requester=" ada ", backend="cpu")
        assert (request.requester, request.cases) == ("ada", 2 + 2)  # the floor, the empty kernel
        many = Sweep(
            ("flexq-w6a6",),
            tuple(range(1, MAX_CASES // 2)),
            SWEEP.shapes,
            ("gemm", "linear"),
            ("cold", "hot"),
        )
        with pytest.raises(UsageError, match="a request may have 2,000"):
            sweep_request(session, many, requester="ada", backend="cpu")
        unknown = Sweep(("flexq-w6a7",), (1,), SWEEP.shapes)
        with pytest.raises(UsageError, match="no kernel 'flexq-w6a7'"):
            sweep_request(session, unknown, requester="ada", backend="cpu")
        with pytest.raises(UsageError, match="no suite '/etc/passwd'"):
            checked_request(session, "suite", {"suite": "/etc/passwd"}, requester="ada")


def test_cases_of_a_request_are_counted_without_building_them(database, monkeypatch):
    sizes = tuple(range(1, 1001))
    shapes = tuple(Shape(n, 128, "") for n in sizes)
    monkeypatch.setattr("flexq_bench.workloads.suite._combine", None)

    with (
        database.session() as session,
        pytest.raises(UsageError, match="1,000,000 cases, and a request may have 2,000"),
    ):
        sweep_request(session, Sweep(("flexq-w6a6",), sizes, shapes), requester="ada")


def test_stored_request_that_is_too_large_is_not_served(database, a_pool, commit):
    sweep = Sweep(("flexq-w6a6",), tuple(range(1, 1001)), (SHAPE, Shape(64, 256, "")))
    info = RequestInfo(
        "1" * 32, "sweep", sweep.as_data(), "ada", "", 1, None, datetime.now(UTC)
    )  # says that it has one case
    with database.session() as session:
        add_request(session, info, limits=LIMITS)

    done = served(database, a_pool(None), commit)

    assert (done.state, done.run) == ("failed", None)
    # each M of both shapes, the floor of each, the empty kernel
    assert "this makes 2,003 cases, and a request may have 2,000" in done.detail


def test_a_stored_request_reads_no_file(database, a_pool, commit, tmp_path):
    secret = tmp_path / "secret.toml"
    secret.write_text('description = "5ec3e7"')
    for number, (kind, content) in enumerate(
        (
            ("suite", {"suite": str(secret)}),
            ("sweep", SWEEP.as_data() | {"m": f"@{secret}"}),
            ("sweep", SWEEP.as_data() | {"shapes": [{"n": 1, "k": 1, "model": str(secret)}]}),
            ("sweep", SWEEP.as_data() | {"kernels": [f"@{secret}"]}),
        )
    ):
        info = RequestInfo(str(number), kind, content, "ada", "", 1, None, datetime.now(UTC))
        with database.session() as session:
            add_request(session, info, limits=LIMITS)

        done = served(database, a_pool(None), commit)

        assert (done.state, done.run) == ("failed", None)
        assert "5ec3e7" not in done.detail


def test_served_request_is_a_run_with_trigger_sweep(database, a_pool, a_result, commit):
    request = ask(database)

    done = served(database, a_pool(lambda case: a_result()), commit)

    assert (done.request, done.state) == (request.uuid, "done")
    with database.session() as session:
        [row] = queries.requests(session)
        run = queries.run_by_uuid_prefix(session, done.run)
    assert (row.state, row.run, run.trigger, run.status) == ("done", run.uuid, "sweep", "complete")
    assert run.received == request.cases
    assert served(database, a_pool(lambda case: a_result()), commit) is None


def test_next_server_completes_the_run_of_a_dead_one(database, a_pool, a_result, commit):
    ask(database)
    answers = iter([a_result(), SystemExit()])
    with pytest.raises(SystemExit):
        served(database, a_pool(lambda case: next(answers)), commit)
    assert served(database, a_pool(lambda case: a_result()), commit) is None  # its lease holds
    with database.session() as session:
        [row] = queries.requests(session)
        renew_request(session, row.uuid, row.server, until=row.created_at)

    measured = []
    served(database, a_pool(lambda case: measured.append(case.key) or a_result()), commit)

    with database.session() as session:
        assert queries.run_by_uuid_prefix(session, row.run).received == 4
    assert len(measured) == 3


def test_request_that_ends_three_servers_is_given_up(database, a_pool, a_result, commit):
    ask(database)
    second = ask(database, requester="bob")

    def killed(case):
        raise SystemExit

    for _ in range(3):
        dies(database, a_pool(killed), commit)
    over = served(database, a_pool(killed), commit)
    after = served(database, a_pool(lambda case: a_result()), commit)

    assert (over.state, over.detail) == (
        "failed", "quarantined: 3 workers ended while they measured it"
    )  # fmt: skip
    assert (after.request, after.state) == (second.uuid, "done")
    with database.session() as session:
        assert queries.run_by_uuid_prefix(session, over.run).status == "failed"


def test_result_between_two_server_deaths_counts_as_progress(database, a_pool, a_result, commit):
    ask(database)
    for _ in range(3):
        answers = iter([a_result(), SystemExit()])
        dies(database, a_pool(lambda case, answers=answers: next(answers)), commit)
    done = served(database, a_pool(lambda case: a_result()), commit)

    assert done.state == "done"


def test_stopped_server_returns_its_request(database, a_pool, a_result, commit):
    ask(database)
    for error in (KeyboardInterrupt(), InfrastructureError("the GPU fell off the bus")) * 2:
        answers = iter([error])
        with pytest.raises(type(error)):
            served(database, a_pool(lambda case, answers=answers: next(answers)), commit)

    assert served(database, a_pool(lambda case: a_result()), commit).state == "done"


class Outage:
    """Sessions of a database, of which some fail. lost: what they did is committed nevertheless."""

    def __init__(self, database, first, count, *, lost):
        self.session, self.first, self.count, self.lost = database.session, first, count, lost
        self.opened = 0

    @contextmanager
    def __call__(self):
        number, self.opened = self.opened, self.opened + 1
        fails = self.first <= number < self.first + self.count
        if fails and not self.lost:
            raise UnreachableError("no answer")
        with self.session() as session:
            yield session
        if fails:
            raise UnreachableError("no answer")


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "acknowledgement lost"])
def test_outage_is_waited_for_and_counts_as_no_death(
    database, a_pool, a_result, commit, monkeypatch, quick, lost
):
    monkeypatch.setattr(
        request_worker, "HEARTBEAT_S", 60.0
    )  # sessions in the same order every time
    monkeypatch.setattr(request_worker, "_wait_for_lease_renewals", lambda: None)
    session, first, was_reached = database.session, int(lost), True
    while was_reached:
        request = ask(database)
        away = Outage(database, first, 3, lost=lost)
        monkeypatch.setattr(database, "session", away)
        ends = [served(database, a_pool(lambda case: a_result()), commit)]
        if ends[0].state == "queued":  # given back: the next look finds it
            ends.append(served(database, a_pool(lambda case: a_result()), commit))
        monkeypatch.setattr(database, "session", session)

        assert (ends[-1].request, ends[-1].state) == (request.uuid, "done"), first
        with database.session() as opened:
            run = queries.run_by_uuid_prefix(opened, ends[-1].run)
            [row] = [one for one in queries.requests(opened) if one.uuid == request.uuid]
        assert (run.received, run.status, row.state) == (request.cases, "complete", "done"), first
        was_reached, first = away.opened > first, first + 2
    assert first > 10


def test_request_that_cannot_be_measured_fails(database, a_pool, commit):
    ask(database, Sweep(("flexq-w6a6",), (1,), SWEEP.shapes))
    pool = a_pool(None)

    def refuse(cases):
        raise MeasureError("it would take 9 TiB")

    pool.check = refuse
    done = served(database, pool, commit)

    assert (done.state, done.detail) == ("failed", "it would take 9 TiB")


def test_cancelled_request_stops_after_the_current_case(database, a_pool, a_result, commit):
    request = ask(database)

    def answer(case):
        with database.session() as session:
            cancel_request(session, request.uuid, person="bob", at=datetime.now(UTC))
        return a_result()

    done = served(database, a_pool(answer), commit)

    assert done.state == "cancelled"
    with database.session() as session:
        run = queries.run_by_uuid_prefix(session, done.run)
    assert (run.status, run.received) == ("interrupted", 1)


def test_open_requests_of_a_person_are_limited(database):
    for _ in range(4):
        ask(database)
    with pytest.raises(LimitError, match="ada has 4 open requests"):
        ask(database)
    ask(database, requester="bob")
