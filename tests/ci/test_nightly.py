"""Nightly runs: measurement, resume, comparisons, alerts and gaps."""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from made_nights import SUITE, MadePool
from sqlalchemy import text

from flexq_bench.ci.backfill import fill_gap, find_gaps
from flexq_bench.ci.nightly import Rules, rejudge_night
from flexq_bench.ci.reports import nightly as night_report
from flexq_bench.cli import nightly as verb
from flexq_bench.cli.app import main
from flexq_bench.cli.nightly import exit_code
from flexq_bench.db import queries
from flexq_bench.db.fleet import abandon_jobs
from flexq_bench.db.records import CommitInfo
from flexq_bench.db.releases import store_releases
from flexq_bench.errors import InfrastructureError, MissingResultsError, UsageError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.fleet import PoolOptions
from flexq_bench.fleet.prometheus import prometheus_text
from flexq_bench.fleet.watchdog import stalls
from flexq_bench.runs.lifecycle import new_run
from flexq_bench.workloads.errors import WorkloadError

KEY = "flexq-w6a6 gemm cold m1n256k256"


def test_finished_night_is_not_repeated(a_night):
    first, reports = a_night(1, canaries=1)
    again, same = a_night(1, canaries=1)

    assert ("A CPU", KEY) in first.measured
    assert (again.measured, again.contests) == ([], [])
    assert same == reports
    assert reports[0].received == reports[0].planned == len(first.measured)


@pytest.mark.usefixtures("seven_nights")
def test_metrics_have_state_and_age_of_nights(a_night, database):
    a_night(8, us=21.0)

    with database.session() as session:
        told = prometheus_text(session)

    assert re.search(r'flexq_night_age_seconds{suite="made",gpu="A CPU",state="done"} \d', told)
    assert re.search(r'flexq_night_last_success_seconds{suite="made",gpu="A CPU"} \d', told)
    assert re.search(r'flexq_open_alerts{state="\w+"} 1\n', told)


def test_interrupted_night_is_resumed(a_night, database, commits, sha, compared):
    class Stopping(MadePool):
        def compare_now(self, *arguments):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        a_night(1, pool=Stopping(database, commits[sha(1)], compared), canaries=1)

    pool, [report] = a_night(1, canaries=1)

    assert pool.measured == []
    assert report.canaries == 1


def test_second_commit_of_a_day_has_its_own_night(a_night, sha):
    _, [first] = a_night(1, name="2025-11-01")
    pool, [second] = a_night(2, name="2025-11-01")
    again, [same] = a_night(1, name="2025-11-01")

    assert ("A CPU", KEY) in pool.measured
    assert (first.commit, second.commit) == (sha(1), sha(2))
    assert first.run != second.run
    assert (again.measured, same) == ([], first)


def test_later_night_concludes_an_interrupted_night_at_its_commit(
    a_night, database, commits, sha, compared
):
    class Stopping(MadePool):
        def compare_now(self, *arguments):
            raise KeyboardInterrupt

    stopping = Stopping(database, commits[sha(1)], compared)
    with pytest.raises(KeyboardInterrupt):
        a_night(1, pool=stopping, canaries=1, name="2025-11-01")

    pool, [earlier, report] = a_night(2, canaries=1, name="2025-11-01")

    with database.session() as session:
        states = {night.commit: night.state for night in queries.night_states(session)}
        measured = queries.run_by_uuid_prefix(session, report.run)
    assert states == {sha(1): "done", sha(2): "done"}
    assert (measured.commit, bool(pool.measured)) == (sha(2), True)
    assert pool.contests[0][:2] == (sha(1), sha(1))
    assert (earlier.commit, earlier.canaries) == (sha(1), 1)


@pytest.mark.usefixtures("seven_nights")
def test_resumed_night_reports_its_opened_alerts(a_night, database, monkeypatch):
    from flexq_bench.db import nightly as stored_nights

    def killed(session, info, state, **values):
        if state == "done":
            raise KeyboardInterrupt
        stored_nights.set_night(session, info, state, **values)

    with monkeypatch.context() as patched:
        patched.setattr("flexq_bench.ci.nightly.set_night", killed)
        with pytest.raises(KeyboardInterrupt):
            a_night(8, us=21.0)
    with database.session() as session:
        assert queries.alerts(session) == []

    _, [report] = a_night(8, us=21.0)

    with database.session() as session:
        [alert] = queries.alerts(session)
    assert report.opened == (alert.id,)
    assert report.verdicts["slower"] >= 1


def test_resuming_at_another_commit_names_the_first_commit(
    a_night, database, commits, sha, compared
):
    from flexq_bench.cli.nightly import unfinished_night

    class Stopping(MadePool):
        def compare_now(self, *arguments):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        a_night(1, pool=Stopping(database, commits[sha(1)], compared), canaries=1)

    assert unfinished_night(database, "made", commits[sha(1)]) == "2025-11-01"
    with pytest.raises(UsageError, match=f"2025-11-01 .*begun at {sha(1)[:10]}"):
        unfinished_night(database, "made", commits[sha(2)])


@pytest.mark.usefixtures("seven_nights")
def test_confirmed_outlier_opens_an_alert(a_night, sha):
    pool, [report] = a_night(8, us=21.0)

    assert pool.contests[0][:2] == (sha(3), sha(8))
    assert KEY in pool.contests[0][2]
    assert report.candidates >= 1
    assert report.verdicts["slower"] >= 1
    assert report.opened
    lines, page = "\n".join(night_report.lines([report])), night_report.markdown([report])
    assert f"opened alert {report.opened[0]}" in lines
    assert f"flexq-bench explain {report.opened[0]}" in page
    for told in (lines, page):
        assert re.search(r"slower: \S+ gemm cold m1n256k256, \+[45]\.\d+%, 99 % bounds", told)
        assert f"({sha(3)[:10]}..{sha(8)[:10]})" in told
    tests = ElementTree.fromstring(night_report.junit([report]))
    [failed] = [
        case.get("name") for case in tests.iter("testcase") if case.find("failure") is not None
    ]
    assert failed in report.worse
    assert (tests.get("failures"), tests.get("errors")) == ("1", "0")


@pytest.mark.usefixtures("seven_nights")
def test_rejudged_night_has_the_same_verdicts_and_alerts(a_night, database, monkeypatch):
    """Its project's kernels need not be loaded."""
    _, [report] = a_night(8, us=21.0)
    monkeypatch.setattr("flexq_bench.kernels.registry.resolve", None)
    with database.session() as session:
        decisions = session.scalar(text("SELECT count(*) FROM decision"))

    [again] = rejudge_night(database, "2025-11-08", alerting=True)

    assert (again.verdicts, again.opened, again.worse) == (
        report.verdicts,
        report.opened,
        report.worse,
    )
    with database.session() as session:
        assert session.scalar(text("SELECT count(*) FROM decision")) == decisions
    with pytest.raises(UsageError, match="no night 2025-12-24 was judged"):
        rejudge_night(database, "2025-12-24", alerting=True)


class Creeping(MadePool):
    """A case takes 0.18 % longer with every commit after the third."""

    def __init__(self, database, commit, compared, order):
        super().__init__(database, commit, compared, us=self.level(order))

    @staticmethod
    def level(order):
        return 20.0 * 1.0018 ** max(order - 3, 0)

    def compare_now(self, gpu, base, head, cases):
        levels = [self.level(int(sha, 16)) for sha in (base, head)]
        self.us = 20.0 * levels[1] / levels[0]
        return super().compare_now(gpu, base, head, cases)


@pytest.mark.usefixtures("seven_nights")
def test_candidates_beyond_the_budget_wait(a_night):
    [first], [second] = (a_night(order, us=22.0, candidates=1)[1] for order in (8, 9))

    said = f"{first.candidates - 1} candidates were not compared, as the budget is 1"
    assert said in "\n".join(night_report.lines([first])) + night_report.markdown([first])
    assert {key for key, *_ in second.not_compared} != {key for key, *_ in first.not_compared}


def test_rejudging_changes_no_age_and_no_waiting_candidates(a_night, database):
    _ = [a_night(order) for order in range(1, 8)]
    a_night(8, us=22.0, candidates=0)
    with database.session() as session:
        ages = {night.name: night.updated_at for night in queries.night_states(session)}

    rejudge_night(database, "2025-11-07", alerting=True)

    with database.session() as session:
        assert {n.name: n.updated_at for n in queries.night_states(session)} == ages
    [second] = a_night(9, us=22.0, candidates=0)[1]
    assert {waited for _, waited, _ in second.not_compared} == {2}


def test_creeping_series_is_compared_with_the_release_once(
    a_night, database, commits, sha, compared
):
    contests, opened = {}, {}
    for order in range(1, 14):
        pool = Creeping(database, commits[sha(order)], compared, order)
        _, [report] = a_night(order, pool=pool)
        contests[order] = [base for base, _, _ in pool.contests if base == sha(3)]
        opened[order] = report.opened
        if order == 3:
            with database.session() as session:
                store_releases(session, {"v1": sha(3)})

    night = next(order for order, found in opened.items() if found)
    with database.session() as session:
        [alert] = queries.alerts(session)
    assert (alert.good.sha, alert.bad.sha) == (sha(3), sha(night))
    assert 8 < night < 13  # 1 % at 0.18 % a night, and the median of five nights trails by two
    assert not any(contests[order] for order in range(9, night))
    assert not any(contests[order] for order in range(night + 1, 14))  # somebody is told


class Aging(Creeping):
    """The machine gets slower, and the code does not."""

    def compare_now(self, gpu, base, head, cases):
        self.us = 20.0
        return MadePool.compare_now(self, gpu, base, head, cases)


@pytest.mark.slow
def test_creeping_machine_is_compared_with_the_release_once(
    a_night, database, commits, sha, compared
):
    asked = []
    for order in range(1, 16):
        pool = Aging(database, commits[sha(order)], compared, order)
        a_night(order, pool=pool)
        cases = [case for base, _, cases in pool.contests if base == sha(3) for case in cases]
        asked += [order] * (KEY in cases and order > 8)  # until then it is what nights trust
        with database.session() as session:
            store_releases(session, {"v1": sha(3)})

    assert len(asked) == 1


@pytest.mark.usefixtures("seven_nights")
def test_open_alert_is_compared_again_only_when_its_level_moves(a_night, sha):
    a_night(8, us=21.0)

    quiet = [a_night(order, us=21.0)[0].contests for order in range(9, 13)]
    pool, [report] = a_night(13, us=22.5, canaries=1)

    assert quiet == [[], [], [], []]
    (base, head, cases), (canary, itself, chosen) = pool.contests
    assert (base, head, canary, itself) == (sha(8), sha(13), sha(13), sha(13))
    assert chosen == [case for case in cases if case.startswith("flexq")]
    assert report.opened


@pytest.mark.parametrize(
    "slow_nights",
    [2, *(pytest.param(nights, marks=pytest.mark.slow) for nights in (1, 4))],
)
@pytest.mark.usefixtures("seven_nights")
def test_alert_is_fixed_after_its_cause_is_reverted(a_night, database, slow_nights):
    for order in range(8, 8 + slow_nights):
        a_night(order, us=21.0)

    _, [report] = a_night(8 + slow_nights, us=20.0)

    with database.session() as session:
        [alert] = queries.alerts(session)
    assert (report.fixed, alert.state) == ((alert.id,), "fixed")


@pytest.mark.parametrize("alerting", [True, False])
@pytest.mark.usefixtures("seven_nights")
def test_slower_case_fails_the_job_without_alerting(a_night, database, alerting):
    _, [report] = a_night(8, us=21.0, alerting=alerting)

    assert bool(report.opened) == alerting
    assert exit_code([report], alerting=alerting) == ExitCode.REGRESSION
    assert exit_code([replace(report, worse=(), opened=())], alerting=alerting) == ExitCode.PASS
    joined = replace(report, opened=())
    assert (exit_code([joined], alerting=alerting) == ExitCode.PASS) == alerting


@pytest.mark.parametrize("order", [2, 3])
def test_step_in_the_first_nights_opens_an_alert(a_night, sha, order):
    for quiet in range(1, order):
        a_night(quiet)

    pool, [report] = a_night(order, us=21.0)

    assert pool.contests[0][:2] == (sha(1), sha(order))
    assert report.opened


def test_interrupted_night_names_the_resuming_command(tmp_path, monkeypatch, capsys):
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flexq_bench.ci.nightly.measure_night", stopped)
    path = str(tmp_path / "flexq.sqlite")

    given = ["--backend", "cpu", "--canaries", "1", "--no-alert"]
    code = main(["nightly", "smoke", "--night", "one", *given, "--db", path])

    assert code == 130
    hint = f"nightly smoke --night one {' '.join(given)} --db {path}"
    assert hint in capsys.readouterr().err


def test_canary_updates_the_noise_calibration_only(a_night, database, sha):
    pool, [report] = a_night(1, canaries=1)

    assert pool.contests[-1][:2] == (sha(1), sha(1))
    assert (report.canaries, report.opened) == (1, ())
    with database.session() as session:
        assert len(queries.aa_calibration(session)) == 1


@pytest.mark.parametrize("kind", [InfrastructureError, WorkloadError])
def test_night_with_a_failed_comparison_is_incomplete(
    a_night, database, commits, sha, compared, kind
):
    class Broken(MadePool):
        asked = 0

        def compare_now(self, *arguments):
            self.asked += 1
            raise kind("the node has no git")

    pool = Broken(database, commits[sha(1)], compared)
    _, [report] = a_night(1, pool=pool, canaries=1)

    # An error of the device is tried again, one of the code is not.
    assert pool.asked == (3 if kind is InfrastructureError else 1)
    [(case, base, reason)] = report.uncompared
    assert (case.split()[1], base, report.outcome) == ("gemm", sha(1), "incomplete")
    for said in ("\n".join(night_report.lines([report])), night_report.markdown([report]), reason):
        assert "the node has no git" in said
    assert exit_code([report], alerting=True) == ExitCode.MISSING
    with database.session() as session:
        assert [night.state for night in queries.night_states(session)] == ["done"]


class Vanishing(MadePool):
    """Its GPUs of these kinds are lost while they compare."""

    lost = ()

    def compare(self, works, on_compared):
        super().compare([work for work in works if work.gpu not in self.lost], on_compared)
        for work in works:
            if work.gpu in self.lost:
                with self.database.session() as session:
                    abandon_jobs(session, work.run, f"no {work.gpu} came within 3 s")
                self.kinds = [kind for kind in self.kinds if kind.gpu != work.gpu]


def test_lost_kind_does_not_stop_other_kinds(a_night, database, commits, sha, compared):
    kinds = ("A CPU", "Another CPU")
    for order in range(1, 8):
        a_night(order, gpus=kinds)
    losing = Vanishing(database, commits[sha(8)], compared, us=21.0, gpus=kinds)
    losing.lost = ("Another CPU",)

    _, reports = a_night(8, pool=losing, canaries=1)

    done, lost = reports
    assert (done.outcome, bool(done.opened)) == ("complete", True)
    assert (lost.outcome, lost.opened, lost.verdicts) == ("incomplete", (), {})
    assert {reason for *_, reason in lost.uncompared} == {"no Another CPU came within 3 s"}
    assert len(lost.uncompared) == lost.comparisons > 1
    assert exit_code(reports, alerting=True) == ExitCode.MISSING
    with database.session() as session:
        states = {n.gpu: n.state for n in queries.night_states(session, name="2025-11-08")}
        metrics = prometheus_text(session)
        [alert] = queries.alerts(session)
        series_of_one_kind = len(alert.series)
    assert states == {"A CPU": "done", "Another CPU": "comparing"}
    assert 'flexq_comparisons{gpu="Another CPU",state="no-device"}' in metrics
    assert re.search(
        r'flexq_unfinished_night_seconds{night="2025-11-08",.*"comparing"} \d', metrics
    )

    class Reverted(MadePool):
        """Its results are no outliers; commit 8 was slower."""

        def compare_now(self, gpu, base, head, cases):
            self.us = 21.0 if head == sha(8) else 20.0
            return super().compare_now(gpu, base, head, cases)

    pool, later = a_night(9, pool=Reverted(database, commits[sha(9)], compared, gpus=kinds))

    assert [(r.night, r.gpu, r.outcome) for r in later] == [
        ("2025-11-08", "Another CPU", "complete"),
        ("2025-11-09", "A CPU", "complete"),
        ("2025-11-09", "Another CPU", "complete"),
    ]
    assert later[0].verdicts["slower"] >= 1
    with database.session() as session:
        [alert] = queries.alerts(session)
    assert len(alert.series) == 2 * series_of_one_kind
    assert (sha(3), sha(8)) in [contest[:2] for contest in pool.contests]


@pytest.mark.usefixtures("seven_nights")
def test_partial_verdicts_are_kept_when_the_rest_arrives(a_night, database, commits, sha, compared):
    class TwoDevices(MadePool):
        """One job is done, then the others have no device."""

        def compare(self, works, on_compared):
            [work] = works
            with self.database.session() as session:
                first, *others = queries.jobs_of(session, work.run, kind="compare")
                session.execute(
                    text("UPDATE job SET state = 'no-device', reason = 'gone' WHERE id > :first"),
                    {"first": first.id},
                )
            assert others
            super().compare(works, on_compared)

    pool = TwoDevices(database, commits[sha(8)], compared, us=21.0)
    pool.kinds[0].devices = 4

    _, [partial] = a_night(8, pool=pool)
    _, [whole] = a_night(8, us=21.0)

    assert 0 < sum(partial.verdicts.values()) < sum(whole.verdicts.values())
    assert (partial.outcome, whole.outcome) == ("incomplete", "complete")
    assert set(partial.opened) <= set(whole.opened)
    with database.session() as session:
        assert {alert.id for alert in queries.alerts(session)} == set(whole.opened)


def test_kind_that_cannot_be_judged_does_not_stop_others(a_night, database, monkeypatch):
    from flexq_bench.verdicts import nightly as stored_verdicts

    def broken(session, comparisons, machine, commits, **options):
        if machine.device.sku == "A CPU":
            raise InfrastructureError("git has no such commit")
        return stored_verdicts.record_night(session, comparisons, machine, commits, **options)

    monkeypatch.setattr("flexq_bench.ci.nightly.record_night", broken)
    _, [unjudged, judged] = a_night(1, gpus=("A CPU", "Another CPU"), canaries=1)

    assert (unjudged.outcome, judged.outcome) == ("incomplete", "complete")
    assert unjudged.notes == ("not judged: git has no such commit",)
    assert exit_code([unjudged], alerting=True) == ExitCode.MISSING
    with database.session() as session:
        states = {night.gpu: night.state for night in queries.night_states(session)}
    assert states == {"A CPU": "comparing", "Another CPU": "done"}


def test_waiting_night_is_noted_then_given_up(a_night, database, commits, sha, compared):
    kinds = ("A CPU", "Another CPU")
    losing = Vanishing(database, commits[sha(1)], compared, gpus=kinds)
    losing.lost = ("Another CPU",)
    a_night(1, pool=losing, canaries=1)

    reports = {order: a_night(order)[1] for order in range(2, 17)}

    notes = [note for report in reports[2] for note in report.notes]
    assert [note for note in notes if "2025-11-01" in note and "Another CPU" in note]
    first = reports[15][0]
    assert (first.night, first.outcome) == ("2025-11-01", "incomplete")
    assert all(report.night != "2025-11-01" for report in reports[16])


@pytest.mark.usefixtures("seven_nights")
def test_killed_coordinator_loses_no_comparison(a_night, database, commits, sha, compared):
    class Killed(MadePool):
        def compare_now(self, *arguments):
            if self.contests:
                raise SystemExit
            return super().compare_now(*arguments)

    pool = Killed(database, commits[sha(8)], compared, us=21.0)
    pool.kinds[0].devices = 2  # two jobs for the two cases
    with pytest.raises(SystemExit):
        a_night(8, pool=pool)

    second, [report] = a_night(8, us=21.0)

    done, rest = ({key for *_, keys in p.contests for key in keys} for p in (pool, second))
    assert done
    assert rest
    assert not done & rest
    assert sum(report.verdicts.values()) == len(done | rest) == report.comparisons
    assert report.opened


@pytest.mark.parametrize("reason", ["node 7 has other code of flexq-bench", ""])
def test_missing_kind_is_reported_with_its_reason(
    a_night, database, commits, sha, compared, reason
):
    a_night(1, gpus=("A CPU", "Another CPU"))
    pool = MadePool(database, commits[sha(2)], compared)
    pool.refusals["Another CPU"] = reason

    _, [here, missing] = a_night(2, pool=pool)

    assert (here.outcome, missing.gpu) == ("complete", "Another CPU")
    assert missing.outcome == ("refused" if reason else "absent")
    expected = reason or "no Another CPU was available"
    assert missing.reasons == {expected: missing.planned}
    assert expected in "\n".join(night_report.lines([missing]))
    assert exit_code([here, missing], alerting=True) == ExitCode.MISSING
    with database.session() as session:
        stalled = [stall.reason for stall in stalls(session) if stall.what == "night"]
        assert stalled == []  # for an hour
        session.execute(text("UPDATE night SET updated_at = '2020-01-01 00:00:00' "
                             "WHERE state = 'measuring'"))  # fmt: skip
        [stalled] = [stall.reason for stall in stalls(session) if stall.what == "night"]
    assert expected in stalled
    _, [back, _] = a_night(2, gpus=("Another CPU",))
    assert (back.gpu, back.outcome, back.reasons) == ("Another CPU", "complete", {})


def test_gpus_that_refuse_their_first_night_are_reported(a_night, database, commits, sha, compared):
    pool = MadePool(database, commits[sha(1)], compared, gpus=("NVIDIA A100",))
    pool.refused_gpus = {"A100": "a broken node", "H200": "the build fails"}

    _, [here, refused] = a_night(1, pool=pool)

    assert (here.outcome, refused.outcome, refused.gpu) == ("complete", "refused", "H200")
    assert "the build fails" in "\n".join(night_report.lines([refused]))
    assert exit_code([here, refused], alerting=True) == ExitCode.MISSING


def test_absent_gpu_leaves_a_gap_that_is_filled_later(a_night, database, sha):
    a_night(1, gpus=("A CPU", "Another CPU"))
    a_night(2, options={"seed": 3})
    with database.session() as session:
        [gone] = [n for n in queries.night_states(session, name="2025-11-02") if "Another" in n.gpu]
        jobs = queries.jobs_of(session, gone.run)
        assert queries.run_options(session, gone.run) == {"seed": 3}
    assert {(j.state, j.reason) for j in jobs} == {("no-device", "no Another CPU was available")}

    gpus = ["A CPU", "Another CPU"]
    [gap] = find_gaps(database, "made", gpus, night="2025-11-03", cases=100)
    assert (gap.night, gap.gpu, gap.commit) == ("2025-11-02", "Another CPU", sha(2))
    assert find_gaps(database, "made", gpus, night="2025-11-03", cases=gap.missing - 1) == []
    assert find_gaps(database, "made", gpus, night="2025-11-02", cases=100) == []


def test_unfillable_gap_has_a_reason(a_night, database, monkeypatch):
    from contextlib import contextmanager

    a_night(1, gpus=("A CPU", "Another CPU"))
    a_night(2)
    [gap] = find_gaps(database, "made", ["Another CPU"], night="2025-11-03", cases=100)

    @contextmanager
    def checkout(repository, commit):
        yield Path("/nowhere")

    monkeypatch.setattr("flexq_bench.ci.backfill.worktree", checkout)
    asked = []

    def resume(folder, arguments):
        asked.append((folder, arguments))
        return 5, "the database is of a later version"

    filled = fill_gap(database, gap, Path(), ["--cluster", "auto"], resume=resume)

    assert asked == [(Path("/nowhere"), ("run", "--resume", gap.run, "--cluster", "auto"))]
    assert (filled.remaining, filled.detail) == (gap.missing, "the database is of a later version")


@pytest.mark.usefixtures("seven_nights")
def test_sweeps_are_not_a_baseline(a_night, database, commits, sha):
    from flexq_bench.db.store import add_record, begin_run

    run = replace(new_run("sweep", "sweep", (KEY,)), created_at=datetime.now(UTC).isoformat())
    with database.session() as session:
        before = queries.run_results(session, queries.night_states(session)[0].run)
        series = next(row.series_id for row in before if row.case == KEY)
        base = queries.trusted_bases(session, [series])
        record = next(
            r for r in queries.run_records(session, queries.night_states(session)[0].run)
            if r.case == KEY
        )  # fmt: skip
        begin_run(session, run, commits[sha(20)])
        add_record(session, replace(record, uuid="s", run=run, commit=commits[sha(20)]))

        assert queries.trusted_bases(session, [series]) == base
        points = queries.series_history(session, series, without_sweeps=True)
    assert sha(20) not in {point.commit for point in points}


def test_backfill_passes_the_database_in_the_environment(a_night, database, monkeypatch, tmp_path):

    a_night(1, gpus=("A CPU", "Another CPU"))
    a_night(2)
    started = []

    @contextmanager
    def checkout(repository, commit):
        yield tmp_path

    def run(command, **options):
        started.append((command, options["env"]))
        return subprocess.CompletedProcess(command, 5, "", "")

    monkeypatch.setattr("flexq_bench.ci.backfill.worktree", checkout)
    monkeypatch.setattr("flexq_bench.ci.backfill.subprocess.run", run)
    url, rules = "postgresql://me:secret@host/db", Rules("2025-11-03", tmp_path)
    verb._backfill(database, PoolOptions(), url, "made", ["Another CPU"], rules, 100)

    [(command, environment)] = started
    assert "secret" not in " ".join(command)
    assert environment["FLEXQ_BENCH_DB"] == url


@pytest.fixture
def history(tmp_path, git, compared, monkeypatch):
    """A repository whose later commits are slower; measure() measures 19 of them.

    pools: those that were opened. The last commit can't be imported.
    """
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    lines = []
    for number in range(20):
        text = f"{number}"
        lines += [
            "commit refs/heads/main",
            f"committer Ada <ada@example.org> {1_700_000_000 + number} +0000",
            f"data {len(text)}\n{text}",
            f"M 100644 inline a\ndata {len(text)}\n{text}",
        ]
    stream = "\n".join(lines).encode()
    subprocess.run(["git", "-C", tmp_path, "fast-import", "--quiet"], input=stream, check=True)
    shas = git(tmp_path, "rev-list", "--reverse", "main").split()
    pools = []

    def opened(sha, *, builds):
        order = shas.index(sha)
        parent = shas[order - 1] if order else None
        commit = CommitInfo(sha, parent, order, dirty=False, project="made")

        def check():
            if order == 19:
                raise MissingResultsError("no kernels")

        return SimpleNamespace(
            project=SimpleNamespace(name="made"),
            revision=SimpleNamespace(commit=commit),
            measured=None,
            suite=lambda name: SUITE,
            check_loaded=check,
        )

    @contextmanager
    def open_pool(database, options, commit):
        us = (20.0 if commit.topo_order < 10 else 22.0) + 0.01 * (commit.topo_order * 7 % 5)
        pools.append(MadePool(database, commit, compared, us))
        yield pools[-1]

    monkeypatch.setattr("flexq_bench.fleet.open_pool", open_pool)
    unwatched = "flexq_bench.cli.measuring.progress"
    monkeypatch.setattr(unwatched, lambda total: nullcontext(lambda record: None))
    monkeypatch.setattr(verb, "given_options", lambda verb: {})

    def measure(url, capsys):
        place = SimpleNamespace(is_local=True, repeat=1, pool=lambda *a, **b: None)
        sources = SimpleNamespace(project=str(tmp_path), open_project=opened)
        code = verb._measure_history(
            verb.HistoryOptions("main~19..main"), sources, None, place, 0, None, url,
            verb.NightOptions(), as_json=True,
        )  # fmt: skip
        return code, json.loads(capsys.readouterr().out)

    return SimpleNamespace(measure=measure, shas=shas, pools=pools)


def test_backfill_compares_the_commits_around_a_change_once(history, database, capsys):
    code, first = history.measure(database.url, capsys)
    _, again = history.measure(database.url, capsys)

    contests = [contest for pool in history.pools for contest in pool.contests]
    assert contests == [(history.shas[9], history.shas[10], [KEY])]
    assert (first["change_points"], first["verdicts"], len(first["opened"])) == (0, 1, 1)
    assert (again["verdicts"], again["opened"], again["obstacles"]) == (0, [], [])
    with database.session() as session:
        [alert] = queries.alerts(session)
    assert (alert.id, alert.bad.sha) == (first["opened"][0], history.shas[10])
    assert code == ExitCode.MISSING  # the last commit
