"""The command line, run in this process on a database of the test's own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # its helper: made_projects

from made_projects import make_times

from flexq_bench.cli.app import main
from flexq_bench.measure import external_kernels
from flexq_bench.repository.provenance import current_commit


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on stderr."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        return lines[0]


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default path of the commands' database; nothing is there yet."""
    path = tmp_path / "results" / "flexq.sqlite"
    monkeypatch.setenv("FLEXQ_BENCH_DB", str(path))
    return path


@pytest.fixture
def checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, git: Callable[..., str]
) -> Callable[[int], list[str]]:
    """checkout(count): commits that look like ours, oldest first; the current folder has them."""

    def make(count: int) -> list[str]:
        folder = tmp_path / "checkout"
        package = folder / "flexq_bench" / "measure" / "ab"
        package.mkdir(parents=True)
        git(folder, "init", "-q", "-b", "main")
        (folder / "flexq_bench" / "__init__.py").touch()
        made = []
        for number in range(count):
            (package / "worker.py").write_text(str(number))
            git(folder, "add", ".")
            git(folder, "commit", "-q", "-m", f"change {number}")
            made.append(git(folder, "rev-parse", "HEAD"))
        monkeypatch.chdir(folder)
        return made

    return make


@pytest.fixture(scope="session")
def three_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with a floor, the empty kernel and one GEMM, measured once for all tests.

    As of a clean checkout of main, whose results are accepted and exported.
    """
    path = tmp_path_factory.mktemp("measured") / "flexq.sqlite"
    shape = ("--m", "1", "--n", "32", "--k", "32")
    out = ("--db", str(path), "--out", str(path.with_suffix(".parquet")))
    clean = replace(current_commit(), dirty=False, branch="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexq_bench.cli.measuring.current_commit", lambda: clean)
        assert main(("sweep", "--kernels", "cublas-fp16", *shape, *out)) == 0
    return path


@pytest.fixture
def measured(three_results: Path, database: Path) -> Path:
    """The path that commands use, with three results in it."""
    database.parent.mkdir()
    shutil.copy(three_results, database)
    return database


@pytest.fixture
def cli(database: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    def run(*arguments: str) -> Ran:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    yield run
    external_kernels.forget()  # those that commands of this process adopted


@pytest.fixture
def made_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of kernels of projects are made from their sources."""
    make_times(monkeypatch)
