"""The wheel, in an environment that sees what it depends on but not this checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("flexq_bench", "kernels", "workloads", "db", "dashboard", "ci")
DATA = {".cu", ".cuh", ".toml", ".mako", ".csv", ".css", ".html", ".json"}


@pytest.fixture(scope="module")
def installed(install):
    return install()


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


def test_wheel_is_marked_as_typed(wheel):
    assert "flexq_bench/py.typed" in zipfile.ZipFile(wheel).namelist()


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


# The wheel's one package, tested above, is why the order makes no difference.
@pytest.mark.slow
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
        install = (*pip, "install", "--no-compile", "--no-index", "--no-deps", str(file))
        subprocess.run(install, check=True)
    subprocess.run([python, "-c", script], cwd=tmp_path, check=True)
    subprocess.run([*pip, "uninstall", "-y", "flexq-bench"], check=True)

    subprocess.run([python, "-c", "from kernels import get_kernel"], cwd=tmp_path, check=True)


def test_installed_program_runs_the_wheel_s_code(installed):
    findings = {found["name"]: found for found in json.loads(installed("doctor", "--json"))}

    assert findings["code"]["detail"].startswith("pkg-2.")
    assert findings["torch"]["state"] == "ok"


@pytest.mark.slow
def test_installed_program_lists_kernels(installed):
    kernels = json.loads(installed("list", "kernels", "--json"))

    assert "flexq-w6a6" in {kernel["kernel"] for kernel in kernels}


def test_installed_program_lists_suites(installed):
    suites = json.loads(installed("list", "suites", "--json"))

    assert {"smoke", "nightly", "paper-fig10"} <= {suite["suite"] for suite in suites}


@pytest.mark.slow
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
