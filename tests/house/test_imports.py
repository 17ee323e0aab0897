"""The direction of imports (pyproject.toml, [tool.importlinter]): kept, and noticed when broken."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from transformers.utils import is_kernels_available

ROOT = Path(__file__).parents[2]
ROOMS = ("flexq_bench", "kernels", "workloads", "db", "dashboard", "ci")
ONE_DIRECTION = "The house has one direction of import"
WITHIN_THE_SERVICE = "The service has one direction of import"


def lint_imports(folder: Path) -> str:
    """Output of import-linter on the rooms in `folder`, under the contracts of this project."""
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-c",
                "from importlinter.cli import lint_imports_command; lint_imports_command()",
            ),
            *("--config", str(ROOT / "pyproject.toml"), "--no-cache", "--no-logo"),
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "120", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


@pytest.fixture
def house(tmp_path):
    """Rooms with nothing in them but the modules that the contracts name."""
    for room in (*ROOMS, *(f"flexq_bench/{name}" for name in layers_of_the_service())):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
    return tmp_path


def layers_of_the_service() -> list[str]:
    """Names of the children of flexq_bench that its contract gives a layer."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = [c for c in settings["contracts"] if c["name"] == WITHIN_THE_SERVICE]
    return re.findall(r"\w+", " ".join(contract["layers"]))


def test_no_room_imports_against_the_arrows():
    assert "0 broken" in lint_imports(ROOT)


@pytest.mark.parametrize(
    ("module", "imported", "contract"),
    [
        ("workloads/new.py", "kernels", ONE_DIRECTION),
        ("kernels/new.py", "db", ONE_DIRECTION),
        ("kernels/new.py", "flexq_bench", ONE_DIRECTION),
        ("flexq_bench/new.py", "dashboard", ONE_DIRECTION),
        ("dashboard/new.py", "ci", ONE_DIRECTION),
        ("db/new.py", "workloads", "db stands alone"),
        ("workloads/new.py", "torch", "workloads know no torch and no CUDA"),
        ("flexq_bench/stats/new.py", "db", "stats are pure functions"),
        ("kernels/new.py", "ray", "kernels store nothing and decide nothing"),
        ("dashboard/new.py", "sqlalchemy", "SQL is written in db only"),
        ("flexq_bench/stats/new.py", "flexq_bench.verdicts", WITHIN_THE_SERVICE),
        ("flexq_bench/verdicts/new.py", "flexq_bench.measure", WITHIN_THE_SERVICE),
        ("flexq_bench/runs/new.py", "flexq_bench.cli", WITHIN_THE_SERVICE),
        ("flexq_bench/decode/new.py", "flexq_bench.accuracy", WITHIN_THE_SERVICE),
        ("flexq_bench/without_a_layer.py", "flexq_bench.errors", WITHIN_THE_SERVICE),
        ("dashboard/new.py", "flexq_bench.cli", "Nothing imports the command line"),
        ("ci/new.py", "typer", "ci has no command line"),
        ("ci/new.py", "flexq_bench.cli", "ci has no command line"),
        ("kernels/new.py", "benchmarks.kernels.heuristic", "Nothing imports benchmarks or tests"),
        ("flexq_bench/cli/new.py", "tests.conftest", "Nothing imports benchmarks or tests"),
    ],
)
def test_an_import_against_the_arrows_is_noticed(house, module, imported, contract):
    (house / module).write_text(f"import {imported}\n")

    assert f"{contract} BROKEN" in lint_imports(house)


def test_the_composition_root_may_import_everything(house):
    root = house / "flexq_bench/cli/app.py"
    root.write_text("import dashboard, ci, db, kernels, workloads\n")

    assert "0 broken" in lint_imports(house)


def test_our_kernels_package_is_not_taken_for_hugging_face_s():
    # transformers looks for a distribution and a __version__ of this name, and would use it.
    import kernels

    assert Path(kernels.__file__).parent == ROOT / "kernels"
    assert not hasattr(kernels, "__version__")
    assert "kernels" not in {d.metadata["Name"] for d in metadata.distributions()}
    assert not is_kernels_available()
