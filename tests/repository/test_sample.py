"""The sample repository of examples/byo, and the script that judges its history."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from flexq_bench.repository.project import open_project, revision
from flexq_bench.repository.project_builds import BuildError, built_tree

ROOT = Path(__file__).parents[2]


def sample_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "byo" / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_expected_alerts_include_earlier_nights(tmp_path, monkeypatch):
    sample_script("make_repository").make(tmp_path / "acme", ("torch",))
    judge = sample_script("judge_history").Judge(tmp_path / "acme", tmp_path / "db.sqlite", [])
    nights, commits = [], judge.git("rev-list", "--reverse", "main").splitlines()

    def command(verb, *words):
        if verb == "nightly":
            nights.append(judge.git("rev-parse", "HEAD"))
        alerts = [{"bad": {"sha": commits[10]}}] if commits[10] in nights else []
        runs = [{"trigger": "nightly", "commit": night} for night in nights]
        printed = json.dumps(alerts if verb == "alerts" else runs)
        return subprocess.CompletedProcess([], verb == "nightly" and len(nights) == 1, printed, "")

    monkeypatch.setattr(judge, "command", command)
    judge.nights(range(11, 12))  # the slower commit
    judge.nights(range(12, 14))

    assert (judge.mismatches, len(nights)) == (0, 3)


def test_sample_repository_has_30_commits_with_seeded_changes(tmp_path):
    sample_script("make_repository").make(tmp_path / "acme", ("torch", "triton", "nvrtc"))

    def git(*arguments):
        done = subprocess.run(
            ["git", *arguments], cwd=tmp_path / "acme", check=True, capture_output=True, text=True
        )
        return done.stdout

    assert git("rev-list", "--count", "main") == "30\n"
    assert git("diff", "--stat", "fast-again", "slower~1", "--", "kernels") == ""
    changed = git("diff", "--name-only", "slightly-slower~1", "slightly-slower")
    assert "kernels/triton_kernels.py" in changed
    project = open_project(str(tmp_path / "acme"))
    assert len(project.file.kernels) == 3
    with pytest.raises(BuildError, match="does not build"):
        built_tree(project, revision(project, "build-break").checkout)
    assert built_tree(project, revision(project, "builds-again").checkout).folder.is_dir()


def test_every_kernel_of_the_sample_is_bisected(tmp_path):
    kinds = ("torch", "triton", "nvrtc")
    sample_script("make_repository").make(tmp_path / "acme", kinds)
    judge = sample_script("judge_history").Judge(tmp_path / "acme", tmp_path / "db.sqlite", [])

    labels = {f"{kind}-{operands}" for kind in kinds for operands in ("w6a8", "w4a16")}
    assert set(judge.labels()) == labels
