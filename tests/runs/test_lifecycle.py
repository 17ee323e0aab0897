"""Storage of results during a run, and its final status."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from flexq_bench.db import queries
from flexq_bench.db.errors import LockedError, StandbyError, UnreachableError
from flexq_bench.errors import InfrastructureError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.runs import lifecycle, transactions
from flexq_bench.runs.lifecycle import exit_code_of_run, new_run, open_run, store_results
from flexq_bench.runs.worker import MeasuredCase


@pytest.fixture
def execute(database, commit, worker):
    """Execute cases by a script; what is stored afterwards, whatever was raised."""

    def outcomes(script, cases):
        for case in cases:
            answer = script(case)
            if isinstance(answer, BaseException):
                raise answer
            if answer is not None:
                yield MeasuredCase(case, answer, worker)

    def go(script, cases, raises=None):
        run = new_run("smoke", "manual", [case.key for case in cases])
        seen = []
        raised = nullcontext() if raises is None else pytest.raises(raises)
        with raised, open_run(database, run, commit) as opened:
            store_results(opened, cases, outcomes(script, cases), on_record=seen.append)
        with database.session() as session:
            summary = queries.run_by_uuid_prefix(session, run.uuid)
            missing = queries.missing_cases(session, run.uuid)
            records = list(queries.run_records(session, run.uuid))
        assert [record.uuid for record in records] == [record.uuid for record in seen]
        return summary, records, missing

    return go


def test_run_with_all_records_is_complete(execute, a_case, a_result):
    cases = [a_case(m=m) for m in (1, 2, 3)]

    summary, records, missing = execute(lambda case: a_result(), cases)

    assert summary.status == "complete"
    assert [record.case for record in records] == [case.key for case in cases]
    assert (records[0].model, records[0].layer) == ("llama-7b", "o_proj")
    assert exit_code_of_run(records, missing) == ExitCode.PASS


def test_failed_case_does_not_stop_the_run(execute, a_case, a_result):
    def script(case):
        return a_result(status="failed", detail="boom") if case.gemm.m == 1 else a_result()

    summary, records, missing = execute(script, [a_case(m=1), a_case(m=2)])

    assert summary.status == "complete"
    assert [record.status for record in records] == ["failed", "ok"]
    assert exit_code_of_run(records, missing) == ExitCode.INFRASTRUCTURE


def test_planned_case_without_record_is_missing(execute, a_case, a_result):
    def script(case):
        return a_result() if case.gemm.m == 1 else None

    summary, records, missing = execute(script, [a_case(m=1), a_case(m=2)])

    assert summary.status == "failed"
    assert missing == (a_case(m=2).key,)
    assert exit_code_of_run(records, missing) == ExitCode.MISSING


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(), "interrupted"),  # `| head`
        (InfrastructureError("gone"), "failed"),
    ],
)
def test_run_that_ends_early_keeps_its_records(execute, a_case, a_result, error, status):
    def script(case):
        return error if case.gemm.m == 2 else a_result()

    cases = [a_case(m=m) for m in (1, 2, 3)]
    summary, records, missing = execute(script, cases, raises=type(error))

    assert summary.status == status
    assert [record.m for record in records] == [1]
    assert missing == tuple(case.key for case in cases[1:])


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        ("ok", ExitCode.PASS),
        ("noisy", ExitCode.PASS),
        ("unsupported", ExitCode.PASS),
        ("incorrect", ExitCode.REGRESSION),
        ("failed", ExitCode.INFRASTRUCTURE),
    ],
)
def test_exit_code_of_a_run_follows_from_statuses(execute, a_case, a_result, status, verdict):
    _, records, missing = execute(lambda case: a_result(status=status), [a_case()])

    assert exit_code_of_run(records, missing) == verdict


@pytest.mark.parametrize("error", [UnreachableError, StandbyError, LockedError])
def test_result_waits_during_a_database_outage(
    database, commit, worker, a_case, a_result, monkeypatch, caplog, error
):
    monkeypatch.setattr(transactions, "RETRY_INTERVAL_S", 0.01)
    cases, left = [a_case(m=m) for m in (1, 2, 3)], [5]
    real = lifecycle.add_record

    def away(session, record):
        if record.m == 2 and left[0]:
            left[0] -= 1
            raise error("the server does not answer")
        return real(session, record)

    monkeypatch.setattr(lifecycle, "add_record", away)
    run = new_run("smoke", "manual", [case.key for case in cases])
    outcomes = [MeasuredCase(case, a_result(), worker) for case in cases]
    with open_run(database, run, commit) as opened:
        store_results(opened, cases, outcomes, on_record=lambda record: None)

    with database.session() as session:
        assert len(list(queries.run_records(session, run.uuid))) == 3
        assert queries.run_by_uuid_prefix(session, run.uuid).status == "complete"
    assert "results are kept in memory until then" in caplog.text


def test_long_database_outage_ends_the_run(database, commit, monkeypatch):
    monkeypatch.setattr(transactions, "RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr(transactions, "MAX_OUTAGE_S", 0.05)

    def away(session):
        raise UnreachableError("gone")

    run = new_run("smoke", "manual", ())
    told = r"away for .* --resume when it is available"
    with pytest.raises(InfrastructureError, match=told), open_run(database, run, commit) as opened:
        opened.store(away)
