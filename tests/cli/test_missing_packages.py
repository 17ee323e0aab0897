"""A missing package or extra is named with the command that installs it, by any verb."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from flexq_bench.exit_codes import ExitCode
from flexq_bench.kernels.runtime import nvrtc
from flexq_bench.packages import EXTRAS, explain_missing, missing_packages

# Python with a package that is neither found nor importable, as if nobody had installed it.
HIDING = """
import sys
from importlib import metadata
hidden, module = {name!r}, {module!r}
real = metadata.distribution
def distribution(name):
    if name.lower() == hidden:
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.distribution = distribution
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == module:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
sys.argv = ["flexq-bench", *{arguments!r}]
from flexq_bench.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def hide(monkeypatch):
    """Make a module look as if nobody had installed it."""
    return lambda module: monkeypatch.setitem(sys.modules, module, None)


def started_without(name, module, *arguments):
    code = HIDING.format(name=name, module=module, arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("typer", "typer"),
        ("sqlalchemy", "sqlalchemy"),
        ("markdown-it-py", "markdown_it"),  # Rich's
    ],
)
def test_doctor_names_missing_package_and_install_command(name, module):
    ran = started_without(name, module, "doctor")

    assert ran.returncode == 5
    assert f"{name}: not installed; " in ran.stdout
    assert f"-m pip install '{name}" in ran.stdout
    assert ran.stderr == ""


def test_doctor_json_names_missing_package():
    ran = started_without("typer", "typer", "doctor", "--json")

    [check] = json.loads(ran.stdout)
    assert (check["name"], check["state"]) == ("typer", "broken")


@pytest.mark.parametrize("verb", [("list", "suites"), ("--version",)])
def test_missing_package_is_one_line_of_other_commands(verb):
    ran = started_without("typer", "typer", *verb)

    assert ran.returncode == 5
    assert len(ran.stderr.splitlines()) == 1
    assert "typer not installed: " in ran.stderr


def test_missing_package_of_lazy_import_is_named(tmp_path):
    new = str(tmp_path / "new.sqlite")
    ran = started_without("alembic", "alembic", "db", "upgrade", "--db", new)

    assert ran.returncode == 5
    assert ran.stderr.startswith("flexq-bench: alembic not installed: ")


def test_no_required_package_is_missing_here():
    assert missing_packages() == []


def test_without_packaging_only_that_is_named():
    ran = started_without("packaging", "packaging", "doctor")

    assert ran.returncode == 5
    assert ran.stdout.startswith("packaging: not installed; ")


@pytest.mark.parametrize(
    ("module", "command", "user", "extra"),
    [
        ("transformers", "quantize opt-125m --scheme rtn-w4 --out x", "quantize", "models"),
        ("safetensors", "decode opt-125m", "decode", "models"),
        ("transformers", "sweep --config x", "sweep --config", "models"),
        ("transformers", "accuracy --model x", "accuracy", "accuracy"),
        ("transformers", "gate accuracy --model x", "gate accuracy", "accuracy"),
        ("transformers", "sensitivity --model x --data y", "sensitivity", "accuracy"),
        ("ray", "run smoke --cluster local", "--cluster", "fleet"),
        ("streamlit", "dashboard", "dashboard", "dashboard"),
        ("uvicorn", "serve-api", "serve-api", "serve"),
        ("uvicorn", "serve-model x", "serve-model", "serve"),
        ("apprise", "notify", "notify", "notify"),
        ("matplotlib", "sweep --n 8 --k 8 --plot x.png", "sweep --plot", "plots"),
        ("matplotlib", "explain 1 --png x.png", "explain --png", "plots"),
        ("pyarrow", "run smoke --out x.parquet", "--out x.parquet", "parquet"),
    ],
)
def test_verb_names_its_missing_extra(hide, cli, module, command, user, extra):
    hide(module)

    ran = cli(*command.split())

    assert ran.code == ExitCode.INFRASTRUCTURE
    line = f"flexq-bench: {user} needs the extra {extra}: pip install 'flexq-bench[{extra}]'"
    assert ran.error == line


def test_missing_extra_of_a_late_import_is_named():
    error = ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow.parquet")

    assert explain_missing(error) == (
        "pyarrow is not installed: pip install 'flexq-bench[parquet]'"
    )


@pytest.mark.parametrize("arguments", [("static",), ("gate", "static", "--base", "HEAD")])
def test_static_verbs_miss_their_tools_before_compiling(cli, monkeypatch, arguments):
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda _tool: None)
    monkeypatch.setattr(nvrtc, "compile_build", None)

    ran = cli(*arguments)

    assert ran.code == ExitCode.USAGE
    assert ran.error.endswith("is not installed: pip install 'flexq-bench[static]'")


def test_doctor_lists_every_extra_with_its_state(hide, cli):
    hide("ray")

    findings = {found["name"]: found for found in json.loads(cli("doctor", "--json").out)}

    assert {
        f"extra {name}" for name in EXTRAS if name not in ("cuda12", "cuda13")
    } <= findings.keys()
    assert findings["extra models"]["state"] == "ok"
    assert findings["extra fleet"]["state"] == "missing"
    assert findings["extra fleet"]["advice"] == "pip install 'flexq-bench[fleet]'"
