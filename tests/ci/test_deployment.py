"""The action, the image, the compose file and the recipe for Slurm."""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
import stat
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest
import setuptools
import typer
import yaml

from flexq_bench.cli.app import app

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
SLURM = ROOT / "ci" / "cluster" / "slurm-array.sh"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def is_command(words: list[str]) -> bool:
    """Whether these words are a verb with options that it has."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    known = {name for parameter in command.params for name in parameter.opts}
    return {word for word in words if word.startswith("--")} <= known


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """A flexq-bench on the PATH that writes its arguments to a file, and exits with CODE."""
    program = tmp_path / "bin" / "flexq-bench"
    program.parent.mkdir()
    lines = (
        "#!/bin/bash",
        f'printf "%s\\n" "$@" > {tmp_path}/words',
        'while [ "$1" ]; do [ "$1" = --markdown ] && echo "of the gate" > "$2"; shift; done',
        "exit $CODE",
    )
    program.write_text("\n".join(lines))
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CODE", "0")
    return tmp_path / "words"


@pytest.mark.parametrize("code", [0, 1])
def test_gate_of_the_action_passes_its_inputs_and_exit_code(recorder, tmp_path, code):
    step = next(step for step in ACTION["runs"]["steps"] if step["name"] == "Gate")
    given = {"PROJECT": "a folder", "BASE": "aa", "HEAD": "bb", "OPTIONS": "--processes 2"}
    environment = {**os.environ, **given, "CODE": str(code)}
    environment["GITHUB_STEP_SUMMARY"] = str(tmp_path / "summary.md")
    environment["RUNNER_TEMP"] = str(tmp_path / "temp")
    checkout = tmp_path / "checkout"
    for folder in (tmp_path / "temp", checkout):
        folder.mkdir()
    (tmp_path / "secret").write_text("a secret")
    (checkout / "gate.md").symlink_to(tmp_path / "secret")  # a pull request may bring it

    ran = subprocess.run(["bash", "-ec", step["run"]], cwd=checkout, env=environment)

    words = recorder.read_text().splitlines()
    assert ran.returncode == code
    assert words[:4] == ["gate", "perf", "--project", "a folder"]
    assert words[-2:] == ["--processes", "2"]
    assert is_command(words)
    assert (tmp_path / "summary.md").read_text() == "of the gate\n"
    assert (tmp_path / "secret").read_text() == "a secret"


@pytest.mark.parametrize(("given", "installed"), [("", "/action"), ("a-wheel.whl", "a-wheel.whl")])
def test_action_installs_what_is_given_or_itself(recorder, tmp_path, given, installed):
    step = next(step for step in ACTION["runs"]["steps"] if step["name"] == "Install")
    (recorder.parent / "bin" / "flexq-bench").rename(recorder.parent / "bin" / "python")
    environment = {**os.environ, "INSTALL": given, "OWN": "/action"}

    subprocess.run(["bash", "-c", step["run"]], cwd=tmp_path, env=environment, check=True)

    assert recorder.read_text().splitlines() == ["-I", "-m", "pip", "install", installed]


def test_action_uses_only_inputs_that_it_declares():
    used = set(re.findall(r"inputs\.([a-z]+)", (ROOT / "action.yml").read_text()))

    assert used == set(ACTION["inputs"])


def test_services_of_compose_run_commands_of_the_program():
    own = {name: s for name, s in COMPOSE["services"].items() if name != "database"}

    assert all(is_command(list(service["command"])) for service in own.values())
    assert {service["image"] for service in own.values()} == {f"flexq-bench:{VERSION}"}
    for service in own.values():
        assert set(service["depends_on"]) <= set(COMPOSE["services"])


def test_kuberay_names_the_image_of_the_dockerfile():
    text = (ROOT / "ci" / "cluster" / "kuberay.yaml").read_text()

    assert set(re.findall(r"image: (\S+)", text)) == {f"flexq-bench:{VERSION}"}


# Of KubeRay's ray.io/v1 (ray-operator/apis/ray/v1): required fields, and others.
HEAD_GROUP = ({"rayStartParams", "template"}, {"serviceType", "headService", "enableIngress"})
WORKER_GROUP = (
    {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"},
    {"replicas", "numOfHosts", "scaleStrategy"},
)
CLUSTER = (
    {"headGroupSpec"},
    {"workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions", "suspend"},
)


def unlike_its_schema(cluster):
    """Where a RayCluster has a field too many or too few, or a parameter that is no text."""
    spec = cluster["spec"]
    groups = [(spec["headGroupSpec"], HEAD_GROUP)]
    groups += [(group, WORKER_GROUP) for group in spec["workerGroupSpecs"]]
    for part, (required, optional) in [(spec, CLUSTER), *groups]:
        yield from required - part.keys()
        yield from part.keys() - required - optional
    for group, _ in groups:
        yield from (key for key, value in group["rayStartParams"].items() if type(value) is not str)


def test_kuberay_has_the_fields_of_its_schema():
    cluster = yaml.safe_load((ROOT / "ci" / "cluster" / "kuberay.yaml").read_text())
    wrong = copy.deepcopy(cluster)
    wrong["spec"]["workerGroupSpecs"][0]["replica"] = 1
    wrong["spec"]["headGroupSpec"]["rayStartParams"]["num-gpus"] = 0

    assert list(unlike_its_schema(cluster)) == []
    assert list(unlike_its_schema(wrong)) == ["replica", "num-gpus"]


def test_pods_of_kuberay_pass_the_schema_of_kubernetes():
    checker = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    spec = yaml.safe_load((ROOT / "ci" / "cluster" / "kuberay.yaml").read_text())["spec"]

    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **group["template"]}
        checker.validate(pod, "1.30", strict=True)
        pod["spec"]["containers"][0]["img"] = "other"
        with pytest.raises(checker.ValidationError):
            checker.validate(pod, "1.30", strict=True)


def test_task_of_the_slurm_array_measures_its_size(recorder, tmp_path):
    given = {"FLEXQ_BENCH_DB": "postgresql://host/name", "SLURM_ARRAY_TASK_ID": "2"}

    subprocess.run(["bash", str(SLURM)], env={**os.environ, **given}, check=True, cwd=tmp_path)

    words = recorder.read_text().splitlines()
    assert words[words.index("--m") + 1] == "8"
    assert is_command(words)


@pytest.mark.parametrize(
    "words",
    [
        ("shellcheck", "ci/cluster/slurm-array.sh"),
        ("hadolint", "Dockerfile"),
        ("docker-compose", "--file", "compose.yaml", "config", "--quiet"),
    ],
    ids=lambda words: words[0],
)
def test_recipe_passes_its_checker(words):
    if shutil.which(words[0]) is None:
        pytest.skip(f"no {words[0]} here")
    environment = {**os.environ, "POSTGRES_PASSWORD": "secret"}
    subprocess.run(words, check=True, cwd=ROOT, env=environment)


def test_dockerfile_copies_what_it_installs_and_starts_the_program():
    assert re.search(r"^COPY \. (\S+)$", DOCKERFILE, re.M)[1] in DOCKERFILE.split("pip install")[1]
    assert 'ENTRYPOINT ["flexq-bench"]' in DOCKERFILE
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    links = [path for path in (ROOT / "flexq_bench").iterdir() if path.is_symlink()]
    assert not {path.resolve().name for path in links} & set(ignored)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_installation_of_the_dockerfile_works_in_a_new_environment(tmp_path):
    """The pip line is run as written; packages come from the environment of the tests.

    Of these pip sees setuptools alone, which is newer than what a new environment has.
    """
    (line,) = re.findall(r"^RUN (pip install .*)$", DOCKERFILE, re.M)
    venv.create(tmp_path / "env", with_pip=True)
    packages = Path(setuptools.__file__).parents[1]
    (tmp_path / "build").mkdir()
    for path in packages.glob("setuptools*"):
        (tmp_path / "build" / path.name).symlink_to(path)
    python = tmp_path / "env" / "bin" / "python"
    tree = tmp_path / "tree"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
    words = shlex.split(line.replace("/opt/flexq-bench", str(tree)).replace("[$EXTRAS]", ""))

    offline = ("--no-deps", "--no-build-isolation")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "build")}
    subprocess.run([str(python), "-m", *words, *offline], check=True, env=environment)

    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "tests.pth").write_text(f"{packages}\n")
    program = tmp_path / "env" / "bin" / "flexq-bench"
    environment["PYTHONPATH"] = ""
    ran = subprocess.run(
        [str(program), "--version"], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert ran.stdout.strip() == f"flexq-bench {VERSION}", ran.stderr
