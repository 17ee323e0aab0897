"""Trees with scripted workers, and repositories of such trees."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flexq_bench.measure.ab import InterleaveRules, compare_commits
from flexq_bench.measure.ab.commits import compare_trees
from flexq_bench.measure.ab.experiment import Side
from flexq_bench.measure.worker_process import WorkerProcess
from flexq_bench.workloads.case import Case

ROOT = Path(__file__).parents[3]
COMMAND = (sys.executable, "-S", str(Path(__file__).with_name("fake_worker.py")))
CASE = Case.from_key("flexq-w6a6 gemm cold m1n64k64")
RULES = InterleaveRules(processes=5, placements=1, blocks=2, looks=1, timeout_s=20.0)


@dataclass
class Repository:
    """A git repository; commits differ in what their workers say."""

    path: Path
    run_git: Callable[..., str]

    def git(self, *arguments: str) -> str:
        return self.run_git(self.path, *arguments)

    def write(self, **behaviour: object) -> None:
        folder = self.path / "flexq_bench" / "measure" / "ab"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("__init__.py", "measure/ab/worker.py"):
            (self.path / "flexq_bench" / name).touch()
        # In a package: what lies elsewhere is no part of a working tree that is compared.
        (self.path / "behaviour.json").write_text(json.dumps(behaviour))
        (self.path / "flexq_bench" / "speed.py").write_text(f"{behaviour}\n")

    def commit(self, message: str = "a change", **behaviour: object) -> str:
        self.write(**behaviour)
        self.git("add", ".")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(folder))
    return folder


@pytest.fixture
def command():
    return COMMAND


@pytest.fixture
def repository(tmp_path, git):
    path = tmp_path / "repository"
    path.mkdir()
    found = Repository(path, git)
    found.git("init", "-q", "-b", "main")
    return found


@pytest.fixture
def a_tree(tmp_path):
    """A folder whose worker behaves as told."""

    def build(name: str, **behaviour: object) -> Side:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "behaviour.json").write_text(json.dumps(behaviour))
        return Side(name, folder)

    return build


@pytest.fixture(autouse=True)
def cpus_are_free(monkeypatch):
    """Other programs of this machine change no verdict: times of these workers are made up."""
    monkeypatch.setattr(WorkerProcess, "waited_s", lambda _worker: 0.0)


@pytest.fixture
def compared(a_tree):
    """Compare two trees over some cases; the results by case key."""

    def run(base=None, head=None, cases=(CASE,), rules=RULES, **options):
        trees = a_tree("base", **(base or {})), a_tree("head", **(head or {}))
        found = compare_trees(*trees, cases, device="cpu", rules=rules, command=COMMAND, **options)
        return {result.case.key: result for result in found}

    return run


@pytest.fixture
def two_commits(repository):
    """Compare this project with a commit of it in which a kernel does its work twice."""
    for room in ("workloads", "kernels", "flexq_bench", "db"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, repository.path / room, ignore=ignored, symlinks=True)
    repository.git("add", ".")
    repository.git("commit", "-q", "-m", "as it is")
    source = repository.path / "kernels" / "cpu" / "bitplane.py"
    multiply = "    def multiply("
    text = source.read_text()
    assert text.count(multiply) == 1
    twice = (
        "    def multiply(self, *given):\n"
        "        self.once(*given)\n"
        "        return self.once(*given)\n\n"
        "    def once("
    )
    source.write_text(text.replace(multiply, twice))
    repository.git("commit", "-q", "-a", "-m", "twice")

    def run(cases, rules):
        return list(
            compare_commits(repository.path, "main~1", "main", cases, device="cpu", rules=rules)
        )

    return run


@pytest.fixture
def requests(tmp_path):
    """Requests that the worker of a tree received."""

    def read(name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (tmp_path / name / "log").read_text().splitlines()]

    return read


@pytest.fixture
def running(tmp_path):
    """Ids of the processes that run in a tree."""

    def find(name: str) -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(process / "cwd") == str(tmp_path / name):
                    found.append(process.name)
            except OSError:
                continue
        return found

    return find


@pytest.fixture
def started(monkeypatch):
    """The workers that comparisons have started to measure with."""
    found: list[WorkerProcess] = []

    class Noted(WorkerProcess):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            found.append(self)

    monkeypatch.setattr("flexq_bench.measure.ab.experiment.WorkerProcess", Noted)
    return found
