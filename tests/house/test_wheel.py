"""The wheel, in an environment that sees what it depends on but not this checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("flexq_bench", "kernels", "workloads", "db", "dashboard", "ci")
DATA = {".cu", ".cuh", ".toml", ".mako", ".csv", ".css", ".html", ".json"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: setuptools leaves folders behind, and packs what it finds in old ones."""
    source = tmp_path_factory.mktemp("source")
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, source / room, ignore=ignored, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs the installed `flexq-bench` in a folder of its own; gives back the finished process."""
    home = tmp_path_factory.mktemp("elsewhere")
    environment = home / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", str(python), "--quiet"),
            *("--disable-pip-version-check", "install", "--no-index", "--no-deps", str(wheel)),
        ],
        check=True,
    )
    # The folder is put on the path, but its own .pth files are not read: an editable install of
    # this checkout stays out of sight.
    site_packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
    Path(site_packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FLEXQ_"))}

    def run(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [environment / "bin" / "flexq-bench", *arguments],
            cwd=home,
            env=inherited | {"HOME": str(home), "XDG_DATA_HOME": str(home / "data")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    return run


def files_of(room: str) -> set[str]:
    """Modules and data files of a room, by their paths in the wheel."""
    prefix = "" if room == "flexq_bench" else "flexq_bench/"
    return {
        prefix + file.relative_to(ROOT).as_posix()
        for file in (ROOT / room).rglob("*")
        if file.suffix in DATA | {".py"} and "__pycache__" not in file.parts
    }


@pytest.mark.parametrize("room", ROOMS)
def test_wheel_has_every_module_and_data_file(wheel, room):
    packed = set(zipfile.ZipFile(wheel).namelist())

    assert files_of(room) - packed == set()


def test_wheel_holds_one_package(wheel):
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}

    assert {top for top in tops if not top.endswith(".dist-info")} == {"flexq_bench"}


@pytest.fixture
def hugging_face(tmp_path):
    """A wheel of a distribution `kernels` that has one function, as Hugging Face's has."""
    path = tmp_path / "kernels-0.9-py3-none-any.whl"
    described = {
        "METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 0.9\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files = {"kernels/__init__.py": "def get_kernel(name): return name\n"}
    files |= {f"kernels-0.9.dist-info/{name}": text for name, text in described.items()}
    files["kernels-0.9.dist-info/RECORD"] = "".join(f"{name},,\n" for name in files)
    with zipfile.ZipFile(path, "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
    return path


@pytest.mark.parametrize("ours_first", [True, False])
def test_wheel_and_hugging_face_kernels_leave_each_other_alone(
    wheel, hugging_face, tmp_path, ours_first
):
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = str(environment / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--python", python, "--quiet")
    script = "import flexq_bench.exit_codes; from kernels import get_kernel"

    for file in (wheel, hugging_face) if ours_first else (hugging_face, wheel):
        subprocess.run([*pip, "install", "--no-index", "--no-deps", str(file)], check=True)
    subprocess.run([python, "-c", script], cwd=tmp_path, check=True)
    subprocess.run([*pip, "uninstall", "-y", "flexq-bench"], check=True)

    subprocess.run([python, "-c", "from kernels import get_kernel"], cwd=tmp_path, check=True)


def test_installed_program_runs_the_wheel_s_code(installed):
    findings = {found["name"]: found for found in json.loads(installed("doctor", "--json"))}

    assert findings["code"]["detail"].startswith("pkg-2.")
    assert findings["torch"]["state"] == "ok"


def test_installed_program_lists_kernels_and_suites(installed):
    kernels = json.loads(installed("list", "kernels", "--json"))
    suites = json.loads(installed("list", "suites", "--json"))

    assert "flexq-w6a6" in {kernel["kernel"] for kernel in kernels}
    assert {"smoke", "nightly", "paper-fig10"} <= {suite["suite"] for suite in suites}


def test_installed_program_stores_a_run_in_a_new_database(installed):
    installed("db", "upgrade", "--db", "results.sqlite")

    lines = installed(
        *("run", "smoke", "--backend", "cpu", "--kernels", "flexq-w6a6", "--m", "4"),
        *("--stage", "linear", "--db", "results.sqlite", "--json", "-"),
    )

    records = [json.loads(line) for line in lines.splitlines()]
    assert {record["kernel"] for record in records} >= {"flexq-w6a6", "read-6"}
    assert {record["status"] for record in records} <= {"ok", "noisy"}
    assert all(record["commit"].startswith("pkg-2.") for record in records)
