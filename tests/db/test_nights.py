"""What the latest night was, in both kinds of database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

from flexq_bench.db import queries
from flexq_bench.db.decisions import add_alert_note, add_decisions, open_alert
from flexq_bench.db.errors import NotFoundError, RecordError
from flexq_bench.db.queries import Judgement, OutcomeRow

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GATE = "interleaved"


@pytest.fixture
def decide(session, build):
    """decide(base=1, head=2, gpu="NVIDIA H200", night=1): stores a decision."""
    numbers = count()

    def store(*, gpu="NVIDIA H200", night=1, **changes):
        record = build.a_record(gpu=gpu, device=build.a_device(sku=gpu))
        changes |= {"uuid": f"decision {next(numbers)}", "created_at": NOW + timedelta(days=night)}
        add_decisions(session, [build.a_decision(record, **changes)])

    return store


def test_night_of_each_gpu_counts_verdicts_newest_first(session, decide):
    decide(verdict="faster", night=1)
    decide(night=2)
    decide(base=2, head=3, night=2)
    decide(verdict="same", night=2)
    decide(gpu="NVIDIA A100", verdict="ambiguous", night=1)

    head, other = f"{2:040x}", f"{3:040x}"
    one, two = NOW + timedelta(days=1), NOW + timedelta(days=2)
    assert queries.judgements(session, gate_detector=GATE) == [
        Judgement("", "NVIDIA H200", True, two, (head, other), {"same": 1, "slower": 2}),
        Judgement("", "NVIDIA A100", True, one, (head,), {"ambiguous": 1}),
        Judgement("", "NVIDIA H200", True, one, (head,), {"faster": 1}),
    ]


def test_judgements_tell_gates_and_leave_out_canaries(session, decide):
    decide(night=1)
    decide(night=2, watched=False, detector=GATE)
    decide(night=3, watched=False, detector="change points")
    decide(night=4, base=2, head=2)

    rows = queries.judgements(session, gate_detector=GATE)
    assert [(row.watched, row.created_at) for row in rows] == [
        (False, NOW + timedelta(days=2)),
        (True, NOW + timedelta(days=1)),
    ]


def test_judgements_are_of_the_last_days_before_the_newest(session, decide):
    decide(night=1)
    decide(night=40, gpu="NVIDIA A100")

    assert [row.gpu for row in queries.judgements(session, gate_detector=GATE)] == ["NVIDIA A100"]


def test_outcomes_are_grouped_by_status_and_reason(session, build, add):
    boom = {"status": "failed", "detail": "boom", "accepted": False}
    for m in (1, 2, 4):
        add(m=m, **boom)
    add(m=8)
    add("other", run=build.a_run("other"), m=8)

    run = build.a_run().uuid
    case = "flexq-w6a6 gemm cold m{}n4096k4096"
    assert queries.run_outcomes(session, [run]) == [
        OutcomeRow(run, "NVIDIA H200", "failed", "boom", 3, case.format(1)),
        OutcomeRow(run, "NVIDIA H200", "ok", "", 1, case.format(8)),
    ]


def test_run_outcomes_count_only_the_last_attempt(session, build, add):
    first = {"status": "failed", "detail": "boom", "accepted": False}
    add("first", **first)
    add("second", created_at="2025-11-21T11:00:00+00:00")

    (outcome,) = queries.run_outcomes(session, [build.a_run().uuid])
    assert (outcome.status, outcome.cases) == ("ok", 1)


def test_latest_run_of_each_gpu_includes_failed_runs(session, build, add):
    def run(name, day, **changes):
        return build.a_run(name, created_at=f"2025-11-2{day}T10:00:00+00:00", **changes)

    done, broken = run("done", 1), run("broken", 2, status="failed", suite="nightly")
    static = run("static", 3, suite="static")
    add(run=done)
    add(run=broken)
    add("other", run=done, gpu="NVIDIA A100")
    add(run=static, gpu="sm_90")

    def latest(**narrowed):
        return {gpu: run.uuid for gpu, run in queries.latest_runs(session, **narrowed).items()}

    timed = latest(without_suites=["static"])
    assert timed == {"NVIDIA A100": done.uuid, "NVIDIA H200": broken.uuid}
    assert latest(suite="smoke") == {"NVIDIA A100": done.uuid, "NVIDIA H200": done.uuid}
    assert queries.suite_names(session) == ("nightly", "smoke", "static")


def test_commits_between_excludes_the_first_and_includes_the_last(session, build, add):
    for order in (4, 2, 3, 1, 5):
        commit = build.a_commit(order)
        add(run=build.a_run(str(order)), commit=commit)
    dirty = build.a_commit(3, dirty=True)
    add(run=build.a_run("dirty"), commit=dirty)

    commits = queries.commits_between(session, 2, 4)

    assert [commit.subject for commit in commits] == ["Change 3", "Change 4"]


def test_series_names_need_no_measurement(session, add, decide):
    decide()
    add(kernel="abq-w6a6", m=8)

    named = queries.series_names(session)

    assert [(series.kernel, series.m, series.unit) for series in named] == [
        ("abq-w6a6", 8, "us"),
        ("flexq-w6a6", 1, "us"),
    ]


def test_note_is_kept_and_leaves_the_state(session, build, decide):
    decide()
    alert = open_alert(session, "flexq", build.a_commit(1).sha, build.a_commit(2).sha, NOW)

    add_alert_note(session, alert, person="Ada", note="seen", at=NOW + timedelta(days=1))

    row = queries.alert_by_id(session, alert)
    assert (row.state, row.note, row.closed_at) == ("new", "seen", None)
    last = queries.alert_events(session, alert)[-1]
    assert (last.state, last.person, last.note) == ("new", "Ada", "seen")


def test_empty_note_and_unknown_alert_are_refused(session):
    with pytest.raises(RecordError, match="the note on alert 1 is empty"):
        add_alert_note(session, 1, person="Ada", note=" ", at=NOW)
    with pytest.raises(NotFoundError, match="no alert 999"):
        add_alert_note(session, 999, person="Ada", note="seen", at=NOW)
