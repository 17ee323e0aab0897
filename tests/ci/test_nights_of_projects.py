"""Nightly runs of two projects in one database."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_nights import SUITE, MadePool, unseen

from flexq_bench.ci.nightly import Rules, conclude_nights, measure_night
from flexq_bench.db import queries
from flexq_bench.db.records import DeviceInfo
from flexq_bench.repository.provenance import commit_at
from flexq_bench.runs.machine import Machine
from flexq_bench.verdicts.nightly import record_night
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.probes import is_probe


@pytest.fixture
def a_night(database, commits, sha, compared):
    """a_night("acme", 3): the report on the third commit's night; nothing is compared."""

    def run(project, order, *, us=20.0, gpu="A CPU", suite=SUITE):
        name = sha(order) if not project else f"{order:x}" * 40
        commit = replace(commits[sha(order)], sha=name, project=project)
        pool = MadePool(database, commit, compared, us=us, gpus=(gpu,))
        rules = Rules(f"2025-11-{order:02}", None, canaries=0, candidates=0)
        nights = measure_night(database, pool, suite, commit, rules, progress=unseen)
        [report] = conclude_nights(database, pool, nights, commit, rules, progress=unseen)
        return report

    return run


def test_devices_of_another_project_are_not_expected(a_night, database):
    a_night("", 1)
    a_night("acme", 2, gpu="Their GPU")

    with database.session() as session:
        [theirs] = queries.night_states(session, project="acme")
        [ours] = queries.night_states(session, project="")
    assert (theirs.gpu, ours.gpu) == ("Their GPU", "A CPU")


def test_candidates_of_another_project_do_not_count(a_night):
    for order in range(1, 8):
        a_night("", order)
    waiting = a_night("", 8, us=22.0)
    for order in range(1, 8):
        a_night("acme", order)
    theirs = a_night("acme", 8, us=22.0)

    assert [nights for _, nights, _ in waiting.not_compared] == [1] * waiting.candidates
    assert [nights for _, nights, _ in theirs.not_compared] == [1] * theirs.candidates


@pytest.mark.parametrize(("project", "are_compared"), [("", True), ("acme", False)])
def test_probes_are_compared_where_commits_change_them(
    database, commits, sha, compared, tmp_path, project, are_compared
):
    commit = replace(commits[sha(1)], sha="1" * 40, project=project)
    pool = MadePool(database, commit, compared)
    rules = Rules("2025-11-01", tmp_path, canaries=9)

    nights = measure_night(database, pool, SUITE, commit, rules, progress=unseen)
    conclude_nights(database, pool, nights, commit, rules, progress=unseen)

    [(_, _, keys)] = pool.contests
    assert any(is_probe(Case.from_key(key).kernel) for key in keys) is are_compared
    assert any(not is_probe(Case.from_key(key).kernel) for key in keys)


def test_projects_of_a_repository_have_separate_nights(a_night, database):
    """Both are at the same commits, which were stored for the first of them."""
    suites = {name: replace(SUITE, name=f"{name}.suite") for name in ("gemm", "attention")}
    for order in (1, 2):
        for name, suite in suites.items():
            a_night(name, order, suite=suite)

    with database.session() as session:
        for name, suite in suites.items():
            nights = queries.night_states(session, project=name)
            assert [night.suite for night in nights] == [suite.name] * 2
            runs = queries.latest_runs(session, project=name).values()
            assert [run.suite for run in runs] == [suite.name]
            assert len(queries.commits_between(session, 0, 9, project=name)) == 2
        assert queries.commits_between(session, 0, 9, project="other") == []


def test_night_after_a_rewrite_notes_the_new_root(database, compared, tmp_path, git):
    git(tmp_path, "init", "-q", "-b", "main")
    notes = []
    for order in range(1, 4):
        if order == 2:
            git(tmp_path, "checkout", "-q", "--orphan", "new")
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", f"change {order}")
        git(tmp_path, "branch", "-q", "-M", "main")
        commit = replace(commit_at(tmp_path, git(tmp_path, "rev-parse", "HEAD")), project="acme")
        rules = Rules(f"2025-11-{order:02}", None, canaries=0, candidates=0)
        pool = MadePool(database, commit, compared)
        infos = measure_night(database, pool, SUITE, commit, rules, progress=unseen)
        [report] = conclude_nights(database, pool, infos, commit, rules, progress=unseen)
        notes.append(" ".join(report.notes))

    assert ["has a new root" in text for text in notes] == [False, True, False]


class OfCommits(MadePool):
    """Every case takes as long as the time of its commit: by sha, us."""

    times: dict[str, float]

    def compare_now(self, gpu, base, head, cases):
        ratio = self.times[head] / self.times[base]
        made = [(case, 1.0 if is_probe(case.kernel) else ratio) for case in cases]
        return [
            replace(self._compared(case.kernel, by), case=case, base=base, head=head)
            for case, by in made
        ]


def test_alerts_are_fixed_by_commits_that_have_theirs(database, compared, tmp_path, git):
    git(tmp_path, "init", "-q", "-b", "main")
    times, changes = {}, []

    def night(name, us, *more):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", name, *more)
        sha = git(tmp_path, "rev-parse", "HEAD")
        times[sha] = us
        commit = replace(commit_at(tmp_path, sha), project="acme")
        pool = OfCommits(database, commit, compared, us=us)
        pool.times = times
        rules = Rules(f"{len(times):02}", tmp_path, canaries=0)
        infos = measure_night(database, pool, SUITE, commit, rules, progress=unseen)
        [report] = conclude_nights(database, pool, infos, commit, rules, progress=unseen)
        changes.append((name, report.opened, report.fixed))

    night("first", 20.0)
    night("second", 20.0)
    git(tmp_path, "checkout", "-q", "-b", "side")
    night("slow on side", 30.0)
    night("fast on side", 20.0)
    git(tmp_path, "checkout", "-q", "main")
    night("slow", 24.0)
    git(tmp_path, "checkout", "-q", "side")
    night("as fast on side", 20.0)
    git(tmp_path, "checkout", "-q", "main")
    git(tmp_path, "merge", "-q", "--no-ff", "-m", "merge", "side")
    night("merged", 24.0)
    night("fast", 20.0)

    assert [change for change in changes if change[1:] != ((), ())] == [
        ("slow on side", (1,), ()),
        ("fast on side", (), (1,)),
        ("slow", (2,), ()),
        ("fast", (), (2,)),
    ]


def test_alerts_of_projects_are_separate(database, commits, compared):
    for name, ratio in (("gemm", 1.2), ("attention", 1.3)):
        machine = Machine("cpu", DeviceInfo("CPU-1", "A CPU", "cpu"), name)
        theirs = {sha: replace(commit, project=name) for sha, commit in commits.items()}
        with database.session() as session:
            slower = [compared("flexq-w6a6", ratio)]
            night = record_night(session, slower, machine, theirs, alerting=True)
        assert (len(night.opened), len(night.joined)) == (1, 0)

    with database.session() as session:
        alerts = queries.alerts(session)
    named = [(one.bad.project, one.good.project) for one in alerts]
    assert sorted(named) == [("attention", "attention"), ("gemm", "gemm")]
