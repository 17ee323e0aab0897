"""Every command names a missing package and how to install it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from flexq_bench.packages import _applies, missing_packages

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


def test_missing_package_of_lazy_import_is_named():
    ran = started_without("alembic", "alembic", "db", "stats")

    assert ran.returncode == 5
    assert ran.stderr.startswith("flexq-bench: alembic not installed: ")


def test_no_package_is_missing_here():
    assert missing_packages() == []


@pytest.mark.parametrize(
    ("marker", "extras", "applies"),
    [
        (None, (), True),
        ('sys_platform == "win32"', (), False),
        ('python_version >= "3.9" and os_name == "posix"', (), True),
        ('python_version < "3.10"', (), False),
        ('extra == "client"', (), False),
        ('(sys_platform == "linux") and extra == "client"', ("client", "data"), True),
        ('platform_machine in "x86_64 aarch64 arm64"', (), True),
        ("no marker at all", (), True),
    ],
)
def test_markers_select_packages_of_this_machine(marker, extras, applies):
    assert _applies(marker, extras) is applies
