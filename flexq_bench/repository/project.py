"""The project file of another repository, `flexq-bench.toml`, in its working tree or in a commit.

It is at the repository's root or in a subfolder. Its paths are relative to its own folder.

version = 1
name = "acme-kernels"                # before the dot in the names of its kernels
kernels = ["kernels/w6a8.py"]        # files, or modules next to this file, in src/ or installed
suite = "bench/suite.toml"           # a .toml file, or the name of a built-in suite
policy = "bench/policy.toml"         # optional: policy of `gate perf`
slower_percent = 2.0                 # optional, without a policy: the largest accepted slow-down
owner = "kernels"                    # optional, without a policy: the owner of regressions

[variables]                          # optional: environment variables of builds and kernels
ACME_MODE = "fast"

[build]                              # optional
command = "make"                     # run by a shell in a fresh checkout; default: nothing to build
environment = "pip"                  # none, pip or uv: installs `packages` in addition to ours
packages = ["-r", "requirements.txt"]  # arguments of `pip install`
timeout_s = 1800                     # of the command, and of the installation

[serve]                              # instead of kernels and suite, or in addition: an engine
command = "bin/serve --port {port}"  # in the folder of a built commit; see `gate served`
policy = "bench/served.toml"         # with [[speed]]
ready_within_s = 900
"""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from flexq_bench.db.records import CommitInfo
from flexq_bench.errors import UsageError
from flexq_bench.kernels.external.sources import KernelSource, normalized
from flexq_bench.repository.git import GitError, git_output, run_git
from flexq_bench.repository.provenance import commit_at
from flexq_bench.repository.working_tree import WORKING_TREE, snapshot
from flexq_bench.repository.worktrees import repository_of, resolve_revision
from flexq_bench.workloads.data_files import (
    Amount,
    AnyText,
    Count,
    DataTable,
    Text,
    Texts,
    must_be,
    read_toml,
    validated,
)
from flexq_bench.workloads.errors import WorkloadError

FILE = "flexq-bench.toml"
VERSION = 1
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"""^\s*name\s*=\s*["']([^"'\n]+)["']""", re.MULTILINE)
_OURS = ("HOME", "PYTHONPATH", "TMPDIR")
Environment = Literal["none", "pip", "uv"]


class BuildTable(DataTable):
    """Build settings of a commit: `[build]`."""

    command: AnyText = ""
    environment: Annotated[Environment, must_be("none, pip or uv")] = "none"
    packages: Texts | tuple[()] = ()
    timeout_s: Amount = 1800.0
    network: bool = False  # for builds of unreviewed code, which otherwise have none


class ServeTable(DataTable):
    """The engine of a commit: `[serve]`."""

    command: Text
    policy: Text
    ready_within_s: Amount = 900.0


class ProjectFile(DataTable):
    """A validated project file; see the docstring of this module."""

    version: Count
    name: Text
    kernels: Texts = ()
    suite: AnyText = ""
    policy: AnyText = ""
    slower_percent: Amount = 2.0
    owner: AnyText = ""
    variables: dict[str, str] = Field(default_factory=dict)
    build: BuildTable = Field(default_factory=BuildTable)
    serve: ServeTable | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("kernels", "suite"):
            if self.serve is None and not getattr(self, name):
                raise ValueError(f"{name} is missing")
        return self

    def sources(self, folder: Path) -> tuple[KernelSource, ...]:
        """Return the sources of its kernels in a checkout."""
        return tuple(
            KernelSource(str(folder / text) if _is_file(text) else text, self.name)
            for text in self.kernels
        )


@dataclass(frozen=True, slots=True)
class BenchmarkFiles:
    """Files that every commit of a project is benchmarked with (`benchmark_files.py`).

    origin: the revision or path that they are from. digest: of their contents. files: contents by
    path in a checkout; added: those that are only added to commits without one of this path.
    """

    origin: str
    digest: str
    files: Mapping[str, bytes]
    added: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Project:
    """Another repository.

    root: its top folder. file: the project file in effect. inside: the folder of the file, relative
    to the root. benchmarks: instead of each commit's own files; None: those are used.
    """

    root: Path
    file: ProjectFile
    inside: Path = Path()
    benchmarks: BenchmarkFiles | None = None

    @property
    def name(self) -> str:
        return normalized(self.file.name)

    def commit(self, sha: str) -> CommitInfo:
        """Return a commit of the repository as in records. Raises InfrastructureError."""
        return replace(commit_at(self.root, sha), project=self.name)

    def at(self, sha: str) -> Project:
        """Return the project at a commit: with the project file, and its folder, of that commit.

        Raises WorkloadError if the commit has no file of the project, or an invalid one.
        """
        if self.benchmarks is not None:
            return self
        inside = self.place_in(sha)
        if inside is None:
            raise WorkloadError(
                f"{sha[:10]} has no {self.inside / FILE}: commit it, take a later commit, or "
                "--project-file HEAD"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / FILE
            path.write_text(self._text_in(sha, inside), "utf-8")
            return replace(self, file=read_project_file(path), inside=inside)

    def moved_to(self, sha: str) -> Project:
        """Return the project with this file, in the folder where a commit has its own file."""
        return replace(self, inside=self.place_in(sha) or self.inside)

    def place_in(self, sha: str) -> Path | None:
        """Return the folder of the project's file in a commit; None: there is none.

        If it is not this folder, the file was moved: it is then found by the project's name.
        """
        if self.benchmarks is not None:
            return self.inside
        if run_git(self.root, "cat-file", "-e", f"{sha}:{self.inside / FILE}").returncode == 0:
            return self.inside
        named = git_output(self.root, "ls-tree", "-r", "-z", "--name-only", "--full-tree", sha)
        places = [Path(name).parent for name in named.split("\0") if Path(name).name == FILE]
        return next((place for place in places if self._name_in(sha, place) == self.name), None)

    def _name_in(self, sha: str, inside: Path) -> str:
        try:
            return normalized(str(tomllib.loads(self._text_in(sha, inside)).get("name", "")))
        except (tomllib.TOMLDecodeError, GitError):
            return ""

    def _text_in(self, sha: str, inside: Path) -> str:
        return git_output(self.root, "cat-file", "blob", f"{sha}:{inside / FILE}")


def open_project(folder: str) -> Project:
    """Open the project of a folder, or of a project file, as checked out.

    The file is searched for in the folder and its parents, up to the top of the repository. Raises
    UsageError if the folder is in no git repository or there is no project file, and WorkloadError
    if the file is invalid.
    """
    root, place = _find_file(folder)
    return Project(root, read_project_file(place / FILE), place.relative_to(root))


def broken_commit(folder: str) -> CommitInfo:
    """Return the checked-out commit of a project whose file may be invalid.

    The project's name is read from the text of the file, or else is that of its folder. Raises
    UsageError as `open_project`.
    """
    root, place = _find_file(folder)
    named = _NAME.search((place / FILE).read_text("utf-8", "replace"))
    name = normalized(named[1] if named else place.name)
    return replace(commit_at(root, resolve_revision(root, "HEAD")), project=name)


def _find_file(folder: str) -> tuple[Path, Path]:
    """Return the repository's root, and the nearest folder upwards that has a project file."""
    if not folder.strip():
        raise UsageError(f"--project {folder!r} names nothing: name a folder, or . for this one")
    path = Path(os.path.expanduser(folder))
    start = path.parent if path.name == FILE else path
    root = repository_of(start).resolve()
    start = start.resolve()
    for place in (start, *start.parents):
        if (place / FILE).is_file():
            return root, place
        if place == root:
            break
    raise UsageError(
        f"{start} has no {FILE}: `flexq-bench init {start}` writes a first one; --project-file "
        "takes another one"
    )


def read_project_file(path: Path) -> ProjectFile:
    """Read and validate a file. Raises WorkloadError with the file and the key."""
    values = read_toml(path)
    version = values.get("version")
    if version != VERSION or isinstance(version, bool):
        newer = type(version) is int and version > VERSION
        todo = "update flexq-bench" if newer else f"begin with version = {VERSION}"
        raise WorkloadError(
            f"{FILE}: version is {version!r}, this flexq-bench reads {VERSION}: {todo}"
        )
    file = validated(ProjectFile, values, FILE)
    for text in file.kernels:
        inside = os.path.normpath(text)
        if _is_file(text) and (os.path.isabs(text) or inside.startswith("..")):
            raise WorkloadError(f"{FILE}: kernels: {text} is not a file of the repository")
    for name in file.variables:
        if not _VARIABLE.fullmatch(name) or name in _OURS or name.startswith("FLEXQ_BENCH_"):
            raise WorkloadError(
                f"{FILE}: variables: {name} is set by flexq-bench, or no name of a variable: "
                "leave it out"
            )
    return file


@dataclass(frozen=True, slots=True)
class ProjectRevision:
    """A revision of a project.

    commit: in the form used in records; dirty for a working tree with changes. checkout: the commit
    to check out; for a working tree with changes, a temporary one that is on no branch.
    """

    commit: CommitInfo
    checkout: str

    @property
    def name(self) -> str:
        """Its name in comparisons: the full sha, with "-dirty" for changes."""
        return self.commit.sha + ("-dirty" if self.commit.dirty else "")


def revision(project: Project, text: str) -> ProjectRevision:
    """Resolve a revision; `.` is the working tree.

    Raises UsageError for an unknown revision, or a working tree that can't be a commit.
    """
    if text == WORKING_TREE:
        tree = snapshot(project.root)
        return ProjectRevision(replace(project.commit(tree.head), dirty=tree.dirty), tree.commit)
    sha = resolve_revision(project.root, text)
    return ProjectRevision(project.commit(sha), sha)


def project_notes(project: Project, base: str, head: str) -> tuple[str, ...]:
    """Return notes on changes of head that do not take effect when it is judged.

    These are changes to files of which base's version is used (project file, suite, policy), and
    files of kernels that base's project file names and head does not have. base, head: full shas.
    """
    file = project.file
    named = (FILE, *(text for text in (file.suite, file.policy) if text.endswith(".toml")))
    places = sorted({project.inside, project.moved_to(head).inside})
    deciding = [str(place / text) for place in places for text in named]
    # A file that was moved without changes needs no note.
    diff = ("diff", "--name-only", "-M100%", "--diff-filter=r")
    changed = git_output(project.root, *diff, base, head, "--", *deciding)
    notes = []
    if changed:
        files = ", ".join(changed.splitlines())
        notes.append(f"not judged: {files} changed by head; base's are used")
    moved = project.moved_to(head)
    missing = [
        text
        for text in file.kernels
        if _is_in(project, base, text) and not _is_in(moved, head, text)
    ]
    if missing:
        files = ", ".join(missing)
        notes.append(
            f"{files}, which base's {FILE} names, is not in head; --trust-head takes head's"
        )
    return tuple(notes)


def _is_in(project: Project, commit: str, kernels: str) -> bool:
    """Return True if a commit has a file of kernels, or a module next to the project file."""
    if _is_file(kernels):
        paths = [Path(kernels)]
    else:
        path = Path(*kernels.split("."))
        paths = [
            folder / file
            for folder in (Path(), Path("src"))
            for file in (path.with_suffix(".py"), path / "__init__.py")
        ]
    return any(
        run_git(project.root, "cat-file", "-e", f"{commit}:{project.inside / path}").returncode == 0
        for path in paths
    )


def _is_file(text: str) -> bool:
    return text.endswith(".py") or "/" in text
