"""The direction of imports (pyproject.toml, [tool.importlinter]): kept, and noticed when broken."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("workloads", "kernels", "db", "dashboard", "ci")  # have no __init__.py
ONE_DIRECTION = "Imports have one direction"


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
    for room in ("", *layers()):
        (tmp_path / "flexq_bench" / room).mkdir()
        name = "a_module.py" if room in ROOMS else "__init__.py"
        (tmp_path / "flexq_bench" / room / name).touch()
    return tmp_path


def layers() -> list[str]:
    """Names of the children of flexq_bench that its contract gives a layer."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = [c for c in settings["contracts"] if c["name"] == ONE_DIRECTION]
    return re.findall(r"\w+", " ".join(contract["layers"]))


def test_no_room_imports_against_the_arrows():
    assert "0 broken" in lint_imports(ROOT)


AGAINST_THE_ARROWS = (
    ("workloads/new.py", "flexq_bench.kernels.a_module", ONE_DIRECTION),
    ("kernels/new.py", "flexq_bench.db.a_module", ONE_DIRECTION),
    ("kernels/new.py", "flexq_bench.errors", ONE_DIRECTION),
    ("runs/new.py", "flexq_bench.dashboard.a_module", ONE_DIRECTION),
    ("dashboard/new.py", "flexq_bench.ci.a_module", ONE_DIRECTION),
    ("db/new.py", "flexq_bench.workloads.a_module", "db stands alone"),
    ("workloads/new.py", "torch", "workloads know no torch and no CUDA"),
    ("stats/new.py", "flexq_bench.db.a_module", "stats are pure functions"),
    ("kernels/new.py", "ray", "kernels store nothing and decide nothing"),
    ("dashboard/new.py", "sqlalchemy", "SQL is written in db only"),
    ("stats/new.py", "flexq_bench.verdicts", ONE_DIRECTION),
    ("verdicts/new.py", "flexq_bench.measure", ONE_DIRECTION),
    ("runs/new.py", "flexq_bench.cli", ONE_DIRECTION),
    ("decode/new.py", "flexq_bench.accuracy", ONE_DIRECTION),
    ("dashboard/new.py", "flexq_bench.cli", ONE_DIRECTION),
    ("ci/new.py", "typer", "ci has no command line"),
    ("ci/new.py", "flexq_bench.cli", ONE_DIRECTION),
    ("kernels/new.py", "benchmarks.kernels.heuristic", "Nothing imports benchmarks or tests"),
    ("cli/new.py", "tests.conftest", "Nothing imports benchmarks or tests"),
)


def test_imports_against_the_arrows_are_noticed(house):
    (house / "flexq_bench" / "without_a_layer.py").touch()
    for module, imported, _ in AGAINST_THE_ARROWS:
        with (house / "flexq_bench" / module).open("a") as file:
            file.write(f"import {imported}\n")

    report = lint_imports(house).partition("Broken contracts")[2]

    # Each contract's name, underlined, and the imports that break it.
    _, *parts = re.split(r"^(.+)\n-+\n", report, flags=re.MULTILINE)
    broken = dict(zip(parts[::2], parts[1::2], strict=True))
    assert "\n- flexq_bench.without_a_layer\n" in broken[ONE_DIRECTION]
    for module, imported, contract in AGAINST_THE_ARROWS:
        importer = f"flexq_bench.{module.removesuffix('.py').replace('/', '.')}"
        of_others = not imported.startswith("flexq_bench.")
        named = imported.partition(".")[0] if of_others else imported
        assert f"- {importer} -> {named} (l." in re.sub("- +", "- ", broken[contract]), importer


def test_the_composition_root_may_import_everything(house):
    root = house / "flexq_bench/cli/app.py"
    root.write_text("".join(f"import flexq_bench.{room}.a_module\n" for room in ROOMS))

    assert "0 broken" in lint_imports(house)


def hidden_modules(init: Path) -> set[str]:
    """Names that a package binds or exports, and that its own modules have too."""
    names: set[str] = set()
    for statement in ast.parse(init.read_text()).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.Assign):
            targets = {target.id for target in statement.targets if isinstance(target, ast.Name)}
            names |= set(ast.literal_eval(statement.value)) if "__all__" in targets else targets
    modules = {path.stem for path in init.parent.glob("*.py")}
    return names & (modules | {path.parent.name for path in init.parent.glob("*/__init__.py")})


def test_names_of_packages_do_not_hide_their_modules(tmp_path):
    # `import package.module as name` would give the package's attribute.
    inits = [
        path for room in (*ROOMS, "flexq_bench") for path in (ROOT / room).rglob("__init__.py")
    ]
    assert {str(init): names for init in inits if (names := hidden_modules(init))} == {}

    (tmp_path / "rows.py").touch()
    (tmp_path / "tables.py").touch()
    (tmp_path / "__init__.py").write_text('from a.rows import rows\n__all__ = ["rows", "tables"]\n')
    assert hidden_modules(tmp_path / "__init__.py") == {"rows", "tables"}
