"""`--project`: verbs over the commits of the sample repository, with its torch kernels."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "byo" / "make_repository.py"
CASE = "acme.torch-w6a8 gemm cold m16n1024k1024"
QUICK = ("--backend", "cpu", "--processes", "1")


@pytest.fixture(scope="module")
def acme(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("make_repository", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder = tmp_path_factory.mktemp("theirs") / "acme"
    script.make(folder, ("torch",), (100, 50))
    return str(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_a_folder_without_a_project_is_wrong_usage(cli, tmp_path):
    ran = cli("run", "--project", str(tmp_path))

    assert ran.code == 2
    assert "is not in a git repository" in ran.error


def test_kernels_of_files_and_of_projects_do_not_mix(cli, acme):
    ran = cli("run", "--project", acme, "--kernels-from", "json")

    assert ran.code == 2
    assert "--kernels-from and --project don't go together" in ran.err


def test_a_commit_that_does_not_build_is_one_line_with_the_exit_code_of_a_broken_build(cli, acme):
    ran = cli(
        *("compare", "build-break", "builds-again", "--project", acme, "--backend", "cpu"),
    )

    assert ran.code == 5
    assert "does not build: " in ran.error


@pytest.mark.slow
def test_results_of_a_project_are_stored_under_its_name_and_commit(cli, acme, git):
    ran = cli("run", "--project", acme, "--backend", "cpu", "--json", "-")

    records = [json.loads(line) for line in ran.out.splitlines()]
    (mine,) = [one for one in records if one["kernel"] == "acme.torch-w4a16"]
    assert ran.code == 0
    assert (mine["project"], mine["status"]) == ("acme", "ok")
    assert mine["commit"] == git(Path(acme), "rev-parse", "HEAD")
    assert mine["run_info"]["suite"] == "acme.suite"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "verdict", "code"), [("wrong-result", "incorrect", 1), ("change-12", "same", 0)]
)
def test_compare_names_what_a_commit_did(cli, acme, git, head, verdict, code):
    if head == "change-12":
        head = git(Path(acme), "rev-parse", "slower~2")

    ran = cli(
        *("compare", f"{head}~1", head, "--project", acme, *QUICK),
        *("--kernels", "acme.torch-w6a8", "--json"),
    )

    (case,) = json.loads(ran.out)["cases"]
    assert case["verdict"] in (verdict, "ambiguous" if verdict == "same" else verdict)
    assert ran.code in (code, 3 if verdict == "same" else code)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_gate_judges_a_wrong_head_by_base_s_file(cli, acme, tmp_path):
    report = tmp_path / "gate.json"
    ran = cli(
        *("gate", "perf", "--project", acme, "--base", "wrong-result~1", "--head", "wrong-result"),
        *("--device", "cpu", "--json", str(report)),
    )

    findings = json.loads(report.read_text())["cases"]
    assert ran.code == 1
    assert {one["outcome"] for one in findings} == {"regression"}
    assert {one["owner"] for one in findings} == {"acme-kernels"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bisect_names_the_commit_that_made_it_slower_and_skips_none_that_builds(cli, acme, git):
    ran = cli(
        *("bisect", CASE, "--good", "slower~3", "--bad", "fast-again~1"),
        *("--project", acme, *QUICK, "--json"),
    )

    report = json.loads(ran.out)
    assert report["suspects"] == [git(Path(acme), "rev-parse", "slower")]
    assert ran.code == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nights_alert_for_the_slower_commit_and_for_no_other(cli, acme, git, tmp_path):
    suite = tmp_path / "tiny.toml"
    suite.write_text(
        'description = "one"\n[[group]]\nkernels = ["acme.torch-w6a8"]\nm = "16"\n'
        'shapes = ["1024x1024"]\n'
    )
    commits = [git(Path(acme), "rev-parse", name) for name in ("slower~2", "slower~1", "slower")]
    for night, commit in enumerate(commits):
        git(Path(acme), "checkout", "-q", commit)
        ran = cli(
            *("nightly", str(suite), "--project", acme, "--night", f"night {night}"),
            *("--backend", "cpu", "--canaries", "0"),
        )
        assert ran.code == (1 if commit == commits[-1] else 0)
    git(Path(acme), "checkout", "-q", "main")

    (alert,) = json.loads(cli("alerts", "list", "--json").out)
    assert alert["bad"]["sha"] == commits[-1]
    assert alert["bad"]["project"] == "acme"
