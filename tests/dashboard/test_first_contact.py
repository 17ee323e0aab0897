"""A stranger's way from an empty repository to a failing pull request and an alert on Home."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from browsing import ROOT
from page_content import OpenPage, words

# README's example, and then the same result computed three times.
EXAMPLE = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
COMMANDS = (
    "git init --quiet --initial-branch main .",
    "cp ../example.py my_kernels.py",
    "flexq-bench init . --install flexq-bench --no-gpu",
    "git add --all && git commit --quiet --message 'A kernel'",
    "flexq-bench run --project .",
    "git switch --quiet --create slower",
    r"sed -i 's/^    out\.copy_.*/&\n&\n&/' my_kernels.py",
    "git commit --quiet --all --message 'Compute it three times'",
)
ALERT = "flexq-bench gate perf --project . --base main --head HEAD --alert"


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and on the PATH flexq-bench, and a gh that keeps the comment's text."""
    programs = {
        "flexq-bench": f'exec {sys.executable} -m flexq_bench.cli "$@"',
        "gh": f'printf "%s\\n" "$@" > {tmp_path}/gh-words',
    }
    for name, line in programs.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{line}\n")
        file.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "FLEXQ_BENCH_DB": str(tmp_path / "results.sqlite"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "NUMBER": "1",
        "BASE": "main",
        "HEAD": "slower",
        "GITHUB_WORKSPACE": str(tmp_path / "mine"),
        **{f"GIT_{who}_NAME": "Ada" for who in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{who}_EMAIL": "ada@example.org" for who in ("AUTHOR", "COMMITTER")},
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "example.py").write_text(EXAMPLE[1], "utf-8")
    folder = tmp_path / "mine"
    folder.mkdir()
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_empty_repository_to_a_failing_pull_request_and_an_alert(
    stranger: Path, open_home: OpenPage
) -> None:
    def ran(command: str, folder: Path = stranger) -> int:
        return subprocess.run(["bash", "-ec", command], cwd=folder).returncode

    before = cpu_s()
    assert [ran(command) for command in COMMANDS] == [0] * len(COMMANDS)
    workflow = yaml.safe_load((stranger / ".github/workflows/flexq-bench.yml").read_text())
    steps = {s["name"]: s["run"] for job in workflow["jobs"].values() for s in job["steps"]
             if "name" in s and "run" in s}  # fmt: skip
    (reports := stranger.parent / "reports").mkdir()  # the runner's own folder
    assert ran(steps["Gate"], reports) == 1
    assert ran(steps["Summary"], reports) == 0
    assert ran(steps["Comment"], reports) == 0
    assert ran(ALERT) == 1

    assert len(COMMANDS) + len(("gate", "comment", ALERT)) <= 12
    assert cpu_s() - before < 300
    asked = (stranger.parent / "gh-words").read_text().splitlines()
    assert asked[:3] == ["pr", "comment", "1"]
    comment = (reports / asked[asked.index("--body-file") + 1]).read_text("utf-8")
    assert "**regression**" in comment
    assert "`mine.my-w8a16`" in comment
    assert (stranger.parent / "summary.md").read_text("utf-8") == comment
    assert "<failure" in (reports / "gate.xml").read_text("utf-8")
    home = words(app := open_home()) + "".join(
        link.proto.label.replace("\\", "") for link in app.get("page_link")
    )
    assert "Alert 1: mine.my-w8a16" in home
    assert "Compute it three times (Ada)" in home


def cpu_s() -> float:
    """Processor time of ended children, s."""
    used: Any = resource.getrusage(resource.RUSAGE_CHILDREN)
    return float(used.ru_utime + used.ru_stime)
