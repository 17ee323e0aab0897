"""One import name: neither Hugging Face's `kernels` nor a user's own packages are in its way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from flexq_bench.exit_codes import ExitCode

ROOT = Path(__file__).parents[2]
ROOMS = ("kernels", "workloads", "db", "dashboard", "ci")
# In place of Hugging Face's package: transformers imports names from it when it is installed.
HUGGING_FACE = """
def get_kernel(name): return name
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda self, *a, **k: None})
"""
METADATA = f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n"
KERNEL = """
from flexq_bench.api import linear_kernel
from kernels.scales import SCALE
import db, ci, workloads, dashboard

@linear_kernel("dense", weight="fp16", backends=["cpu"])
def dense(x, w, out):
    out.copy_(x @ w.T * SCALE)
"""
OWN_TEST = """
from flexq_bench.api import linear_kernel
from kernels.fast import dense
from ci.checks import CHECKS

def test_own_packages():
    assert CHECKS == 3
"""
PROJECT = """
version = 1
name = "acme"
kernels = ["kernels/fast.py"]
suite = "suite.toml"
"""
SUITE = """
description = "one small layer"
source = "made for a test"

[[group]]
kernels = ["acme.dense"]
m = "1"
shapes = ["64x64"]
caches = ["hot"]
"""


def run(
    *command: str,
    cwd: Path,
    path: tuple[Path, ...] = (),
    codes: tuple[int, ...] = (0,),
    **variables: str,
) -> str:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FLEXQ_"))}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=inherited | {"PYTHONPATH": os.pathsep.join(map(str, path))} | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    """A folder of packages with a distribution named `kernels` in it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text(HUGGING_FACE)
    (folder / "kernels.dist-info").mkdir()
    (folder / "kernels.dist-info" / "METADATA").write_text(METADATA)
    return folder


@pytest.mark.slow
def test_checkout_imports_hugging_face_kernels(hugging_face):
    script = "import kernels, transformers.integrations.hub_kernels; print(kernels.__file__)"

    printed = run(sys.executable, "-c", script, cwd=ROOT, path=(hugging_face,))

    assert Path(printed.strip()).parent == hugging_face / "kernels"


@pytest.mark.slow
def test_checkout_runs_beside_hugging_face_kernels(hugging_face):
    version = (sys.executable, "-m", "flexq_bench", "--version")
    tests = (sys.executable, "-m", "pytest", "-q", "tests/workloads/test_case.py")

    run(*version, cwd=ROOT, path=(hugging_face,))
    run(*tests, cwd=ROOT, path=(hugging_face,))


def test_no_module_has_two_names(tmp_path):
    script = f"""
        import sys
        from os.path import realpath
        from flexq_bench.cli.app import main
        main(["list", "kernels", "--json"])
        assert not {set(ROOMS)} & set(sys.modules)
        names = dict()
        for module in set(sys.modules.values()):
            if file := getattr(module, "__file__", None):
                names.setdefault(realpath(file), set()).add(module.__name__)
        ours = [f for f in names if f.startswith({str(ROOT)!r}) and "site-packages" not in f]
        twice = [names[file] for file in ours if len(names[file]) > 1]
        assert len(ours) > 100
        assert not twice, twice
    """

    cache = str(tmp_path)  # a stored list would be read without the kernels
    run(sys.executable, "-c", textwrap.dedent(script), cwd=ROOT, FLEXQ_BENCH_CACHE=cache)


@pytest.fixture
def acme(tmp_path, git):
    """A repository with packages of the names of our rooms, and a kernel in one of them."""
    folder = tmp_path / "acme"
    for room in ROOMS:
        (folder / room).mkdir(parents=True)
        (folder / room / "__init__.py").touch()
    (folder / "kernels" / "fast.py").write_text(KERNEL)
    (folder / "kernels" / "scales.py").write_text("SCALE = 1.0\n")
    (folder / "ci" / "checks.py").write_text("CHECKS = 3\n")
    (folder / "test_own.py").write_text(OWN_TEST)
    (folder / "flexq-bench.toml").write_text(PROJECT)
    (folder / "suite.toml").write_text(SUITE)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


@pytest.fixture
def program(tmp_path):
    """program(folder, …): the command line in a folder, with this checkout on the path."""

    def running(folder: Path, *words: str, codes: tuple[int, ...] = (0,)) -> str:
        own = {"FLEXQ_BENCH_DB": str(tmp_path / "results.sqlite")}
        own |= {"FLEXQ_BENCH_CACHE": str(tmp_path / "cache")}
        command = (sys.executable, "-m", "flexq_bench", *words)
        return run(*command, cwd=folder, path=(ROOT,), codes=codes, **own)

    return running


def test_repository_with_packages_of_our_rooms_passes_its_tests(acme):
    tests = (sys.executable, "-m", "pytest", "-q", "-p", "no:schemathesis", "test_own.py")
    printed = run(*tests, cwd=acme, path=(ROOT,))

    assert "1 passed" in printed


@pytest.mark.slow
def test_repository_with_packages_of_our_rooms_is_measured(acme, program):
    sizes = ("--m", "1", "--n", "64", "--k", "64", "--backend", "cpu")

    source = ("--kernels-from", "kernels/fast.py", "--kernels", "fast.dense")
    swept = program(acme, "sweep", *source, *sizes, "--json", "-")
    ran = program(acme, "run", "--project", ".", "--backend", "cpu", "--json", "-")

    for printed in (swept, ran):
        records = [json.loads(line) for line in printed.splitlines()]
        statuses = {r["status"] for r in records if r["kernel"].endswith(".dense")}
        assert statuses
        assert statuses <= {"ok", "noisy"}


@pytest.mark.slow  # minutes of pairs of processes
@pytest.mark.timeout(1200)
def test_repository_with_packages_of_our_rooms_passes_its_gate(acme, program, git):
    (acme / "README").touch()
    git(acme, "add", ".")
    git(acme, "commit", "-q", "-m", "second")

    gate = ("gate", "perf", "--project", ".", "--base", "HEAD~1", "--device", "cpu")
    program(acme, *gate, codes=(ExitCode.PASS, ExitCode.AMBIGUOUS))  # with noise of the machine
