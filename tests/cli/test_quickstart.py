"""`quickstart`: three suggested commands that work on this machine."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest

from flexq_bench.cli.quickstart import Machine, next_steps

CPU = Machine(gpus=0, run="3f2a", commits=0, changed=False, has_streamlit=True)


def commands(machine):
    return [shlex.split(step.command) for step in next_steps(machine)]


def verbs(machine):
    return [next(word for word in words if word.isalpha()) for words in commands(machine)]


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (CPU, ["dashboard", "sweep", "list"]),
        (Machine(0, None, 0, False, True), ["run", "sweep", "list"]),
        (Machine(0, "3f2a", 2, False, False), ["list", "sweep", "compare"]),
        (Machine(1, "3f2a", 2, True, True), ["dashboard", "sweep", "compare"]),
        (Machine(8, "3f2a", 2, True, True), ["dashboard", "sweep", "run"]),
    ],
    ids=["CPU", "nothing measured", "no streamlit", "GPU and changes", "GPUs"],
)
def test_suggestions_fit_the_machine(machine, expected):
    steps = [[word for word in words if word in expected] for words in commands(machine)]

    assert [words[0] for words in steps] == expected


def test_suggested_comparison_depends_on_local_changes():
    changed, clean = (
        next(
            words
            for words in commands(Machine(0, "3f2a", 2, has_changes, True))
            if "compare" in words
        )
        for has_changes in (True, False)
    )

    assert changed[changed.index("compare") + 1 :][:2] == ["HEAD", "."]
    assert clean[clean.index("compare") + 1 :][:2] == ["HEAD~1", "HEAD"]


@pytest.mark.slow
def test_suggested_commands_run(cli, database, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no git tree
    steps = json.loads(cli("quickstart", "--json", "--db", str(database)).out)

    assert len(steps) == 3
    assert "run smoke" in steps[0]["command"]
    for step in steps[1:]:
        ran = subprocess.run(step["command"], shell=True, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
    assert "dashboard" in cli("quickstart", "--db", str(database)).out
