"""The wheel of this checkout, and environments in which it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("flexq_bench", "kernels", "workloads", "db", "dashboard", "ci")


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def install(wheel, tmp_path_factory):
    """Install the wheel in a new environment; returns a function that runs its `flexq-bench`.

    Of the packages of this environment, all but `refused` can be imported there.
    """

    def make(refused=()):
        home = tmp_path_factory.mktemp("elsewhere")
        environment = home / "venv"
        venv.create(environment, with_pip=False)
        python = environment / "bin" / "python"
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "--python", str(python), "--quiet"),
                *("--disable-pip-version-check", "install", "--no-compile"),
                *("--no-index", "--no-deps", str(wheel)),
            ],
            check=True,
        )
        # The folder is put on the path, but its own .pth files are not read: an editable install of
        # this checkout stays out of sight.
        site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
        lines = [sysconfig.get_path("purelib")]
        if refused:
            (site_packages / "_refuse.py").write_text(REFUSE.format(modules=set(refused)))
            lines.append("import _refuse")
        (site_packages / "dependencies.pth").write_text("\n".join(lines) + "\n")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FLEXQ_"))}

        def run(*arguments: str, codes: Sequence[int] = (0,)) -> str:
            done = subprocess.run(
                [environment / "bin" / "flexq-bench", *arguments],
                cwd=home,
                env=inherited | {"HOME": str(home), "XDG_DATA_HOME": str(home / "data")},
                capture_output=True,
                text=True,
            )
            assert done.returncode in codes, done.stdout + done.stderr
            return done.stdout

        return run

    return make


REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
"""
