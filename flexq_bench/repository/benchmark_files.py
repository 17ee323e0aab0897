"""Today's project file and kernels for commits of any age, which may have none of their own.

The library is each commit's own; the files that benchmark it are those of another revision, or of a
folder. A kernel's file replaces the commit's file of this path. Modules next to it are added where
the commit lacks them. Files from outside the repository are put into a folder of their own.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flexq_bench.errors import UsageError
from flexq_bench.kernels.external.sources import normalized
from flexq_bench.repository.git import git_output, run_git
from flexq_bench.repository.project import (
    FILE,
    BenchmarkFiles,
    Project,
    ProjectFile,
    read_project_file,
)
from flexq_bench.repository.worktrees import find_revision, repository_of

OVERLAY = ".flexq-bench"  # folder of files from outside the repository


@dataclass(frozen=True, slots=True)
class _Tree:
    """Files to take: of a revision, or of a folder on disk. places: maps them into a checkout.

    read: returns a file's content, None: it is missing. modules: names of the files `*.py` in a
    folder.
    """

    origin: str
    read: Callable[[Path], bytes | None]
    modules: Callable[[Path], Sequence[str]]
    place: Path


def project_with_benchmarks(
    folder: str, file: str | None, kernels: Sequence[str] | None
) -> Project:
    """Open the repository of a folder with benchmarks that are not each commit's own.

    file: a project file, its folder, or a revision that has one; None: there is none, and `kernels`
    are measured with the shapes of the suite smoke. kernels: files or modules, instead of those in
    the project file. Raises UsageError, WorkloadError.
    """
    root = repository_of(Path(os.path.expanduser(folder))).resolve()
    if file is None:
        values = {"version": 1, "name": normalized(root.name), "kernels": ["-"], "suite": "smoke"}
        project_file = ProjectFile.model_validate(values)
        inside, tree, named = Path(), _on_disk(root, root), []
    else:
        inside, tree, project_file = _opened(root, Path(folder).resolve(), file)
        named = [project_file.suite] if project_file.suite.endswith(".toml") else []
    taken = _Taken(root, inside)
    if kernels:
        sources = []
        for text in kernels:
            path = Path(text).resolve()
            if path.is_file():
                sources.append(taken.kernel(_on_disk(root, path.parent), path.name))
            elif _is_path(text):
                raise UsageError(f"--kernels-from {text}: there is no such file")
            else:
                sources.append(text)  # a module of each commit, or an installed one
    else:
        sources = [
            taken.kernel(tree, text) if _is_path(text) else text for text in project_file.kernels
        ]
    suite = taken.file(tree, named[0]) if named else project_file.suite
    project_file = project_file.model_copy(update={"kernels": tuple(sources), "suite": suite})
    origin = tree.origin if file is not None else ", ".join(kernels or ())
    return Project(root, project_file, inside, taken.benchmarks(origin))


def _is_path(text: str) -> bool:
    return text.endswith(".py") or "/" in text


class _Taken:
    """Collects files by their path in a checkout."""

    def __init__(self, root: Path, inside: Path) -> None:
        self._root, self._inside = root, inside
        self._files: dict[str, bytes] = {}
        self._added: dict[str, bytes] = {}

    def kernel(self, tree: _Tree, text: str) -> str:
        """Take a file of kernels and the modules next to it; return its path in the project."""
        path = self.file(tree, text)
        parent = Path(text).parent
        for name in tree.modules(parent):
            content = tree.read(parent / name)
            if content is not None:
                self._added[str(tree.place / parent / name)] = content
        return path

    def file(self, tree: _Tree, text: str) -> str:
        content = tree.read(Path(text))
        if content is None:
            raise UsageError(f"{tree.origin} has no {text}, which its {FILE} names")
        path = os.path.normpath(tree.place / text)
        self._files[path] = content
        return os.path.relpath(path, self._inside)

    def benchmarks(self, origin: str) -> BenchmarkFiles:
        added = {path: content for path, content in self._added.items() if path not in self._files}
        digest = hashlib.sha256()
        for path, content in sorted({**added, **self._files}.items()):
            digest.update(f"{path}\0{len(content)}\0".encode() + content)
        return BenchmarkFiles(origin, digest.hexdigest(), self._files, added)


def _opened(root: Path, folder: Path, text: str) -> tuple[Path, _Tree, ProjectFile]:
    """Return the folder of a project file in the checkout, the files next to it, and the file."""
    path = Path(os.path.expanduser(text))
    path = path / FILE if path.is_dir() else path
    if path.is_file():
        tree = _on_disk(root, path.resolve().parent)
        inside = Path() if tree.place == Path(OVERLAY) else tree.place
        return inside, replace(tree, origin=f"{path}"), read_project_file(path)
    sha = find_revision(root, text)
    if sha is None:
        raise UsageError(f"--project-file {text}: no file, no folder, and no revision of {root}")
    listed = git_output(root, "ls-tree", "-r", "-z", "--name-only", "--full-tree", sha).split("\0")
    places = [Path(name).parent for name in listed if Path(name).name == FILE]
    wanted = folder.relative_to(root) if folder.is_relative_to(root) else Path()
    if not places:
        raise UsageError(f"{text} has no {FILE}: name another revision, or a file")
    inside = next(place for place in (wanted, Path(), *places) if place in places)
    tree = _in_revision(root, sha, inside)
    content = tree.read(Path(FILE))
    assert content is not None
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / FILE).write_bytes(content)
        return inside, tree, read_project_file(Path(scratch) / FILE)


def _on_disk(root: Path, folder: Path) -> _Tree:
    def read(path: Path) -> bytes | None:
        return (folder / path).read_bytes() if (folder / path).is_file() else None

    def modules(parent: Path) -> list[str]:
        return sorted(path.name for path in (folder / parent).glob("*.py"))

    is_inside = folder.is_relative_to(root)
    return _Tree(
        str(folder), read, modules, folder.relative_to(root) if is_inside else Path(OVERLAY)
    )


def _in_revision(root: Path, sha: str, inside: Path) -> _Tree:
    def read(path: Path) -> bytes | None:
        name = f"{sha}:{os.path.normpath(inside / path)}"
        if run_git(root, "cat-file", "-e", name).returncode:
            return None
        return git_output(root, "cat-file", "blob", name).encode("utf-8", "surrogateescape")

    def modules(parent: Path) -> list[str]:
        place = os.path.normpath(inside / parent)
        tree = sha if place == "." else f"{sha}:{place}"
        names = git_output(root, "ls-tree", "-z", "--name-only", "--full-tree", tree).split("\0")
        return [name for name in names if name.endswith(".py")]

    return _Tree(f"{sha[:10]}", read, modules, inside)


def write_benchmarks(benchmarks: BenchmarkFiles, checkout: Path) -> None:
    """Write the files into a checkout; those to add only where it has none of this path."""
    to_add = {
        path: content
        for path, content in benchmarks.added.items()
        if not (checkout / path).exists()
    }
    _write(checkout, {**to_add, **benchmarks.files})


def _write(checkout: Path, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        place = checkout
        for part in Path(path).parts:
            place /= part
            # Not through a symbolic link of the commit, to the file or to one of its folders.
            if place.is_symlink() or place.is_file():
                place.unlink()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
