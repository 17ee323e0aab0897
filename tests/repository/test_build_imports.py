"""Imports of a project's modules from the build of the commit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flexq_bench.repository.project import open_project
from flexq_bench.repository.project_builds import built_tree

ROOT = Path(__file__).parents[2]
TOML = 'version = 1\nname = "acme"\nkernels = ["fast.py"]\nsuite = "smoke"\n'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))


EDITABLE = """
import importlib.util
import sys


class Finder:
    def find_spec(name, path=None, target=None):
        if name == "acme":
            return importlib.util.spec_from_file_location(name, {init!r})


sys.meta_path.insert(0, Finder)
"""


def package(folder):
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()


IMPORTING = """
from flexq_bench.repository.build_imports import import_from_build
import_from_build()
import acme
print(acme.__file__)
"""


def found_by_a_process(made, *places):
    """Where a process of the newest commit's build finds `acme`, or why it does not."""
    sha = made.git("rev-parse", "HEAD")
    project = open_project(str(made.path))
    built = built_tree(project.at(sha), sha)
    path = os.pathsep.join(map(str, (*places, ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING],
        env=built.environment({**os.environ, "PYTHONPATH": path}),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.removeprefix(str(built.folder)).strip() or done.stderr.splitlines()[-1]


def test_editable_installation_does_not_replace_a_commit(made, tmp_path):
    package(made.path / "acme")
    made.commit()
    hook = tmp_path / "hook"
    hook.mkdir()
    init = str(made.path / "acme" / "__init__.py")
    (hook / "sitecustomize.py").write_text(EDITABLE.format(init=init))

    assert found_by_a_process(made, hook) == "/acme/__init__.py"

    # Where no path leads to the commit's own package, nothing is measured in its place.
    made.git("mv", "-f", "acme", "lib")
    made.commit()
    package(made.path / "acme")
    said = found_by_a_process(made, hook)
    assert said.startswith(f"ImportError: acme is found in {made.path}/acme")
    assert "which is not the commit's: have the commit installed" in said


def test_installed_package_does_not_replace_a_commit(made, tmp_path):
    package(made.path / "python" / "acme")
    package(tmp_path / "installed" / "acme")
    made.commit(setup_py='from setuptools import setup\nsetup(name="acme")\n')
    installed = tmp_path / "installed"

    assert "which is not the commit's" in found_by_a_process(made, installed)
    made.commit(setup_py='from setuptools import setup\nsetup(name="other")\n')
    assert found_by_a_process(made, installed) == str(installed / "acme" / "__init__.py")


def test_packages_installed_for_a_commit_precede_its_sources(made):
    """Its compiled modules are there alone; a release that something requires is no commit's."""
    package(made.path / "acme")
    made.commit()
    script = """mkdir -p ../site/acme && touch ../site/acme/__init__.py && mkdir ../site/a.dist-info
    echo '{"dir_info": {}, "url": "file://'$1'"}' > ../site/a.dist-info/direct_url.json"""
    (made.path / "build.sh").write_text(script)

    found = []
    for of in ("$PWD", "/else/where"):
        toml = f'{TOML}[build]\ncommand = "sh build.sh {of}"\n'
        made.commit(**{"flexq-bench_toml": toml})
        found.append(found_by_a_process(made))

    assert found[0].endswith("/site/acme/__init__.py")
    assert found[1] == "/acme/__init__.py"
