"""Checks of a machine by `make` before it installs anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine(tmp_path):
    """A machine on which nothing is installed but what `install` puts there."""

    class Machine:
        def install(self, name, script):
            program = tmp_path / name
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)

        def run(self, script, *arguments):
            return subprocess.run(
                ["/bin/sh", ROOT / "ci" / "install" / script, *arguments],
                env={"PATH": str(tmp_path)},
                capture_output=True,
                text=True,
            )

        def path(self, name):
            return str(tmp_path / name)

    machine = Machine()
    for tool in ("cat", "grep", "head", "cut"):
        machine.install(tool, f'PATH=/usr/bin:/bin exec {tool} "$@"')
    return machine


def a_python(version, *, has_venv=True):
    """A python that answers the script's two questions as one of this version would."""
    major, minor = version
    fits = f"import sys; sys.version_info = ({major}, {minor}, 0)"
    venv = "" if has_venv else "; sys.modules['ensurepip'] = None"
    return f"""exec {sys.executable} -c "{fits}{venv}
$2" """


def test_python_3_11_is_taken_before_others(machine):
    for name, version in (("python3", (3, 12)), ("python3.12", (3, 12)), ("python3.11", (3, 11))):
        machine.install(name, a_python(version))

    assert machine.run("find-python").stdout.strip() == machine.path("python3.11")


def test_python_that_does_not_start_is_skipped(machine):
    machine.install("python3.11", "echo 'command not found' >&2; exit 127")
    machine.install("python3.12", a_python((3, 12)))

    assert machine.run("find-python").stdout.strip() == machine.path("python3.12")


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_unsupported_python_is_refused_in_one_line(machine, version):
    machine.install("python3", a_python(version))

    done = machine.run("find-python")

    assert done.returncode != 0
    assert done.stderr.startswith("no Python 3.11, 3.12 or 3.13 found")
    assert done.stderr.count("\n") == 1


def test_python_without_venv_names_the_package_to_install(machine):
    machine.install("python3.11", a_python((3, 11), has_venv=False))

    done = machine.run("find-python")

    assert done.returncode != 0
    assert "apt-get install python3.11-venv" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_python_asked_for_is_the_only_one_looked_at(machine):
    machine.install("python3.11", a_python((3, 11)))
    machine.install("mine", a_python((3, 9)))

    assert machine.run("find-python", machine.path("mine")).returncode != 0


@pytest.mark.parametrize(
    ("driver", "extra"), [("580.65.06", "cuda13"), ("575.57.08", "cuda12"), ("595.10", "cuda13")]
)
def test_the_driver_decides_the_extra(machine, driver, extra):
    machine.install("nvidia-smi", f"printf '{driver}\\n{driver}\\n'")

    assert machine.run("cuda-extra").stdout.strip() == extra


def test_driver_is_read_from_its_module_without_nvidia_smi(machine, tmp_path):
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\n"
        "GCC version:  gcc version 12.3.0\n"
    )

    assert machine.run("cuda-extra", str(version)).stdout.strip() == "cuda13"


def test_no_driver_no_extra(machine, tmp_path):
    machine.install("nvidia-smi", "echo 'NVIDIA-SMI has failed 580.00'; exit 9")

    done = machine.run("cuda-extra", str(tmp_path / "missing"))

    assert (done.returncode, done.stdout) == (0, "")


def test_a_machine_with_a_browser_is_left_alone(machine):
    machine.install("chromium", "exit 1")
    machine.install("chromedriver", "exit 1")
    machine.install("apt-get", "echo asked >&2; exit 1")

    done = machine.run("browser")

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("user", [0, 1000])
def test_failed_browser_installation_is_one_line_and_no_failure(machine, user):
    machine.install("id", f"echo {user}")
    machine.install("timeout", 'shift; exec "$@"')
    machine.install("apt-get", "exit 100")

    done = machine.run("browser")

    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert "browser tests will be skipped" in done.stderr


def test_a_browser_is_installed_where_that_is_allowed(machine, tmp_path):
    machine.install("id", "echo 0")
    machine.install("timeout", 'shift; exec "$@"')
    machine.install("apt-get", f'echo "$*" >> {tmp_path}/asked')

    done = machine.run("browser")

    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "install -y --no-install-recommends chromium chromium-driver"
        in (tmp_path / "asked").read_text()
    )
