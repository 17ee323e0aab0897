"""Requests are checked data: what is not in the registry, the catalog or the bounds is refused."""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from ci.requested_bisection import answered
from db import queries
from db.errors import LimitError, UnreachableError
from db.leases import REQUEST_LEASES
from db.requests import RequestInfo, add_request, cancel_request, renew_request
from flexq_bench.errors import InfrastructureError, MeasureError, UsageError
from flexq_bench.fleet import request_worker
from flexq_bench.fleet.request_worker import serve_next
from flexq_bench.fleet.requests import (
    LIMITS,
    MAX_CASES,
    MAX_COMPARISONS,
    Bisection,
    bisect_request,
    bisection_of,
    checked_request,
    submit,
    sweep_request,
)
from flexq_bench.fleet.retry_policy import MAX_DEATHS
from flexq_bench.runs import outage
from flexq_bench.runs.sweep import Sweep, sweep_of
from workloads.case import Case
from workloads.errors import WorkloadError
from workloads.suite import Shape

SHAPE = Shape(64, 128, "o_proj", "llama-7b")
SWEEP = Sweep(("flexq-w6a6",), (1, 2), (SHAPE,), ("gemm",), ("hot",))


def ask(database, sweep=SWEEP, requester="ada"):
    with database.session() as session:
        request = sweep_request(session, sweep, requester=requester, backend="cpu")
        submit(session, request)
    return request


def served(database, pool, commit, on_record=lambda record: None, search=None):
    (kind,) = pool.kinds
    return serve_next(
        database, pool, kind, commit, "me", on_record=on_record, search=search or answered
    )


def test_a_sweep_survives_the_way_through_data():
    assert sweep_of(SWEEP.as_data()) == SWEEP


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
        ({"code": "1"}, "no field of a sweep 'code'"),
    ],
)
def test_what_is_not_known_or_out_of_bounds_is_refused(changes, message):
    with pytest.raises((UsageError, WorkloadError), match=message):
        sweep_of(SWEEP.as_data() | changes)


def test_a_request_knows_its_size_and_refuses_to_be_too_large(database):
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


def test_the_cases_of_a_request_are_counted_before_any_is_made(database, monkeypatch):
    sizes = tuple(range(1, 1001))
    shapes = tuple(Shape(n, 128, "") for n in sizes)
    monkeypatch.setattr("workloads.suite._combine", None)

    with (
        database.session() as session,
        pytest.raises(UsageError, match="1,000,000 cases, and a request may have 2,000"),
    ):
        sweep_request(session, Sweep(("flexq-w6a6",), sizes, shapes), requester="ada")


def test_a_request_that_is_stored_and_too_large_is_not_served(database, a_pool, commit):
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


def test_a_served_request_is_a_run_of_trigger_sweep(database, a_pool, a_result, commit):
    request = ask(database)

    done = served(database, a_pool(lambda case: a_result()), commit)

    assert (done.request, done.state) == (request.uuid, "done")
    with database.session() as session:
        [row] = queries.requests(session)
        run = queries.run_by_uuid_prefix(session, done.run)
    assert (row.state, row.run, run.trigger, run.status) == ("done", run.uuid, "sweep", "complete")
    assert run.received == request.cases
    assert served(database, a_pool(lambda case: a_result()), commit) is None


def test_a_server_that_dies_leaves_a_run_that_the_next_one_completes(
    database, a_pool, a_result, commit
):
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


def dies(database, pool, commit):
    """A server is killed: nothing of it runs any more, and its lease runs out."""
    with pytest.raises(SystemExit):
        served(database, pool, commit)
    lapse(database)


def lapse(database):
    with database.session() as session:
        [row] = queries.requests(session, states=("running",))
        assert REQUEST_LEASES.renew(session, [row.server], until=row.created_at)


def test_a_request_that_ends_three_servers_is_over_and_the_next_one_is_served(
    database, a_pool, a_result, commit
):
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


def test_a_result_between_two_deaths_is_progress(database, a_pool, a_result, commit):
    ask(database)
    for _ in range(3):
        answers = iter([a_result(), SystemExit()])
        dies(database, a_pool(lambda case, answers=answers: next(answers)), commit)
    done = served(database, a_pool(lambda case: a_result()), commit)

    assert done.state == "done"


def test_a_server_that_is_stopped_gives_its_request_back(database, a_pool, a_result, commit):
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


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(outage, "PAUSE_S", 0.001)
    monkeypatch.setattr(request_worker, "BEAT_S", 0.02)


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "acknowledgement lost"])
def test_an_outage_at_any_moment_is_waited_for_and_nobodys_death(
    database, a_pool, a_result, commit, monkeypatch, quick, lost
):
    monkeypatch.setattr(request_worker, "BEAT_S", 60.0)  # sessions in the same order every time
    monkeypatch.setattr(request_worker, "_wait_for_others", lambda: None)
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


def test_what_cannot_be_measured_here_is_a_failed_request(database, a_pool, commit):
    ask(database, Sweep(("flexq-w6a6",), (1,), SWEEP.shapes))
    pool = a_pool(None)

    def refuse(cases):
        raise MeasureError("it would take 9 TiB")

    pool.check = refuse
    done = served(database, pool, commit)

    assert (done.state, done.detail) == ("failed", "it would take 9 TiB")


def test_a_request_taken_back_stops_after_its_case(database, a_pool, a_result, commit):
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


def test_one_requester_has_few_requests_at_a_time(database):
    for _ in range(4):
        ask(database)
    with pytest.raises(LimitError, match="ada has 4 open requests"):
        ask(database)
    ask(database, requester="bob")


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
        def compare_two(gpu, repository, base, head, cases):
            assert (base, [case.key for case in cases]) == (COMMITS[0], [KEY])
            return [compared("flexq-w6a6", 1.05 if head >= culprit else 1.0)]

        pool.compare = compare or compare_two
        wanted = bisection_of({"case": KEY, "good": COMMITS[0], "bad": COMMITS[-1]})
        with database.session() as session:
            request = bisect_request(session, wanted, requester="ada", gpu="A CPU")
            submit(session, request)
        return request, served(database, pool, commit)

    bisect.pool = pool
    return bisect


def test_a_bisection_that_was_requested_names_the_commit(database, bisected):
    request, done = bisected(COMMITS[5])

    assert (request.cases, done.state, done.run) == (MAX_COMPARISONS, "done", None)
    assert done.detail == f"{COMMITS[5][:10]} made it 5.0 % slower"
    with database.session() as session:
        assert [row.detail for row in queries.requests(session)] == [done.detail]


def test_a_bisection_of_what_nobody_merged_is_refused(database, bisected, monkeypatch):
    monkeypatch.setattr(request_worker, "is_published", lambda *_: False)

    _, done = bisected(COMMITS[5])

    assert (done.state, done.detail) == (
        "failed",
        "0000000000 is in no branch and no tag here: a request measures what was merged",
    )


def test_a_bisection_is_taken_back_between_two_comparisons(database, bisected, compared):
    asked = []

    def compare(gpu, repository, base, head, cases):
        asked.append(head)
        with database.session() as session:
            [row] = queries.requests(session)
            cancel_request(session, row.uuid, person="bob", at=datetime.now(UTC))
        return [compared("flexq-w6a6", 1.05)]

    _, done = bisected(COMMITS[5], compare)

    assert (done.state, len(asked)) == ("cancelled", 1)
    with database.session() as session:
        [row] = queries.requests(session)
    assert row.detail == "cancelled by bob"


def test_a_bisection_that_ends_three_servers_is_over(database, bisected, commit, compared):
    """Of the commit that does it: the answer of the first comparison is in the journal."""

    def killed(gpu, repository, base, head, cases):
        if head != COMMITS[-1]:
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


def test_a_bisection_that_is_stopped_goes_back(database, bisected, commit, compared):
    answers = iter([KeyboardInterrupt()])

    def stopped(*_):
        for error in answers:
            raise error
        return [compared("flexq-w6a6", 1.05)]

    with pytest.raises(KeyboardInterrupt):
        bisected(COMMITS[5], stopped)

    assert served(database, bisected.pool, commit).state == "done"


def test_a_bisection_goes_back_where_the_machine_fails(database, bisected, commit, compared):
    def fails(gpu, repository, base, head, cases):
        if head == COMMITS[-1]:
            return [compared("flexq-w6a6", 1.05)]
        raise InfrastructureError("the GPU fell off the bus")

    for _ in range(MAX_DEATHS + 1):
        with pytest.raises(InfrastructureError, match="fell off the bus; the search stops at"):
            bisected(COMMITS[5], fails) if _ == 0 else served(database, bisected.pool, commit)

    bisected.pool.compare = lambda gpu, repository, base, head, cases: [
        compared("flexq-w6a6", 1.05 if head >= COMMITS[5] else 1.0)
    ]
    assert served(database, bisected.pool, commit).detail.startswith(COMMITS[5][:10])


def test_a_comparison_holds_its_request_for_minutes_and_as_long_as_it_works(
    database, bisected, commit, compared, monkeypatch, quick
):
    """Longer than the lease, which a server that dies leaves behind."""
    assert timedelta(minutes=5) > request_worker.LEASE > 4 * timedelta(seconds=20)
    monkeypatch.setattr(request_worker, "LEASE", timedelta(seconds=0.3))
    meanwhile = []

    def compare(gpu, repository, base, head, cases):
        if not meanwhile:
            time.sleep(0.6)
            meanwhile.append(served(database, bisected.pool, commit))
        return [compared("flexq-w6a6", 1.05 if head >= COMMITS[5] else 1.0)]

    _, done = bisected(COMMITS[5], compare)

    assert (meanwhile, done.state) == ([None], "done")


def test_a_comparison_that_hangs_is_anybodys_in_the_end(
    database, bisected, commit, compared, monkeypatch, quick
):
    monkeypatch.setattr(request_worker, "LEASE", timedelta(seconds=0.1))
    monkeypatch.setattr(request_worker, "LONGEST_COMPARISON_S", 0.1)
    meanwhile = []

    def compare(gpu, repository, base, head, cases):
        if not meanwhile:
            meanwhile.append(None)
            time.sleep(0.5)
            meanwhile.append(served(database, bisected.pool, commit))
        return [compared("flexq-w6a6", 1.05 if head >= COMMITS[5] else 1.0)]

    bisected(COMMITS[5], compare)

    assert meanwhile[1].state == "done"


def test_a_bisection_has_an_end_where_no_commit_has_an_answer(bisected, compared, monkeypatch):
    monkeypatch.setattr(request_worker, "MAX_COMPARISONS", 3)
    asked = []

    def compare(gpu, repository, base, head, cases):
        asked.append(head)
        if head != COMMITS[-1]:
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
