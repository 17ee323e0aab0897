"""Two projects of one repository: their gates, searches, nights, alerts and histories."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from made_projects import CASE, QUICK, made_repository

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def monorepo(tmp_path_factory, git):
    """Two projects of one repository, in folders with a space: one gets slower at tag `slower`,
    the other at `slower-too`, two commits later."""
    whole = Path(made_repository(tmp_path_factory.mktemp("whole") / "acme", (10, 10)))
    root = tmp_path_factory.mktemp("mono repo")
    git(root, "init", "-q", "-b", "main")
    for number in range(9):
        for name, slower in (("gemm", 6), ("attention", 8)):
            git(whole, "checkout", "-q", "slower" if number >= slower else "slower~1")
            folder = root / "kernels of" / name
            shutil.copytree(whole, folder, ignore=lambda *_: [".git"], dirs_exist_ok=True)
            for file in ("flexq-bench.toml", "bench/suite.toml", "bench/policy.toml"):
                text = (folder / file).read_text()
                (folder / file).write_text(text.replace("acme", name))
        (root / "CHANGES").write_text(f"{number}")
        git(root, "add", "--all")
        git(root, "commit", "-q", "-m", f"change {number}")
        git(root, "tag", {6: "slower", 8: "slower-too"}.get(number, f"v{number}"))
    return root


@pytest.mark.slow
@pytest.mark.usefixtures("made_times")
def test_gate_and_bisect_of_project_use_its_own_kernels(cli, monorepo, git):
    codes, suspects = {}, {}
    for name in ("gemm", "attention"):
        project = ("--project", str(monorepo / "kernels of" / name))
        for tag in ("slower", "slower-too"):
            gate = ("gate", "perf", *project, "--base", f"{tag}~1", "--head", tag)
            codes[name, tag] = cli(*gate, "--device", "cpu").code
        case = CASE.replace("acme", name)
        bisect = ("bisect", case, "--good", "v0", "--bad", "main", *project, *QUICK, "--json")
        suspects[name] = json.loads(cli(*bisect).out)["suspects"]

    assert {key for key, code in codes.items() if code} == {
        ("gemm", "slower"),
        ("attention", "slower-too"),
    }
    assert set(codes.values()) == {0, 1}
    assert suspects == {
        "gemm": [git(monorepo, "rev-parse", "slower")],
        "attention": [git(monorepo, "rev-parse", "slower-too")],
    }


@pytest.mark.slow  # 18 nights
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("made_times")
def test_nights_of_two_projects_in_one_repository_stay_separate(cli, monorepo, git, database):
    codes = {}
    shas = git(monorepo, "rev-list", "--reverse", "main").splitlines()
    for number, sha in enumerate(shas):
        git(monorepo, "checkout", "-q", sha)
        for name in ("gemm", "attention"):
            night = ("nightly", "--project", str(monorepo / "kernels of" / name))
            codes[name, number] = cli(*night, "--night", f"2026-01-{number:02}", *QUICK[:2]).code
    git(monorepo, "checkout", "-q", "main")

    assert {key for key, code in codes.items() if code == 1} == {("gemm", 6), ("attention", 8)}
    alerts = json.loads(cli("alerts", "list", "--state", "all", "--json").out)
    assert {
        (alert["good"]["project"], alert["bad"]["project"], alert["bad"]["sha"]) for alert in alerts
    } == {
        ("gemm", "gemm", shas[6]),
        ("attention", "attention", shas[8]),
    }
    with open_database(str(database)) as opened, opened.session() as session:
        for name in ("gemm", "attention"):
            nights = queries.night_states(session, project=name)
            assert [(night.project, night.commit) for night in nights] == [
                (name, sha) for sha in reversed(shas)
            ]
            assert len(queries.commits_between(session, 0, 99, project=name)) == len(shas)
            assert len(queries.releases(session, project=name)) == len(shas)
        histories = [
            (series.project, [point.commit for point in queries.series_history(session, series.id)])
            for series in queries.series_names(session)
        ]
    assert {project for project, _ in histories} == {"gemm", "attention"}
    assert all(commits == shas for _, commits in histories)
