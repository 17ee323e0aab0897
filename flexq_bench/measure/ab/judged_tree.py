"""The tree in which a gate measures head: base's, with head's code under test."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flexq_bench.measure.ab.revisions import RevisionError
from flexq_bench.measure.worker_messages import printable
from flexq_bench.repository.git import GitError, git_output
from flexq_bench.repository.provenance import PACKAGES
from flexq_bench.repository.working_tree import commit_on_no_branch

UNDER_TEST = "kernels"
# Modules of that package that judge results: base's, with any suffix that Python would import.
_JUDGES = frozenset({"__init__", "contract", "errors", "formats", "reference"})
_SOURCES = "csrc"  # device code, which runs in no process
_LINK = "flexq_bench/kernels"  # through which a tree imports that package
_FILE_MODES = frozenset({"100644", "100755"})
_NAMED = 5  # files named by a note, at most


@dataclass(frozen=True, slots=True)
class JudgedTree:
    """A commit that is on no branch, or base if head changes nothing under test.

    runs_code_of_head: in the worker's process; False if only device code differs. changed: paths of
    the files that differ from base's. notes: about changes of head that are not used.
    """

    commit: str
    runs_code_of_head: bool
    changed: frozenset[str]
    notes: tuple[str, ...]


def is_under_test(path: str) -> bool:
    """Return True if a gate takes this file from head.

    No file of head may take precedence over base's: no package or extension module with the name of
    a judging module, no cached bytecode file, no attributes that change how git writes files.
    """
    parts = PurePosixPath(path).parts
    return (
        len(parts) > 1
        and parts[0] == UNDER_TEST
        and parts[1].partition(".")[0] not in _JUDGES
        and "__pycache__" not in parts
        and not any(part.startswith(".") for part in parts)
    )


def judged_tree(repository: Path, base: str, head: str) -> JudgedTree:
    """Base's tree with the files under test of head in place of its own.

    base, head: full ids of commits. Raises RevisionError if they import the package under test by
    different names, and InfrastructureError if git fails.
    """
    old, new = _files(repository, base), _files(repository, head)
    _check_import_names(repository, {base: _LINK in old, head: _LINK in new})
    taken = {path: at for path, at in new.items() if is_under_test(path)}
    links = sorted(path for path, (mode, _) in taken.items() if mode not in _FILE_MODES)
    files = {path: at for path, at in old.items() if not is_under_test(path)}
    files |= {path: at for path, at in taken.items() if path not in links}
    changed = {path for path in old.keys() | files.keys() if old.get(path) != files.get(path)}
    return JudgedTree(
        commit=_commit(repository, files, base, head) if changed else base,
        runs_code_of_head=any(_runs(path) for path in changed),
        changed=frozenset(changed),
        notes=tuple(_notes(repository, base, head, links)),
    )


def _check_import_names(repository: Path, has_link: dict[str, bool]) -> None:
    """Raise RevisionError unless all or none of the commits import flexq_bench.kernels."""
    newer = [commit for commit, has in has_link.items() if has]
    older = [commit for commit, has in has_link.items() if not has]
    if newer and older:
        added = ("log", "-m", "--diff-filter=A", "--format=%H", newer[0], "--", _LINK)
        *_, oldest = git_output(repository, *added).splitlines()
        raise RevisionError(
            f"{older[0][:10]} is from before {oldest[:10]}, the oldest commit with {_LINK}: name "
            "later commits, or measure each by its own program (--trust-head)"
        )


def _files(repository: Path, commit: str) -> dict[str, tuple[str, str]]:
    """Mode and id of each file of a commit, by path."""
    listed = git_output(repository, "ls-tree", "-r", "-z", "--full-tree", commit)
    files = {}
    for line in filter(None, listed.split("\0")):
        described, _, path = line.partition("\t")
        mode, _, name = described.split(" ")
        files[path] = mode, name
    return files


def _commit(repository: Path, files: dict[str, tuple[str, str]], base: str, head: str) -> str:
    lines = "".join(f"{mode} {name}\t{path}\0" for path, (mode, name) in files.items())
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        command = ("update-index", "-z", "--index-info")
        git_output(repository, *command, environment=index, input_text=lines)
        tree = git_output(repository, "write-tree", environment=index)
    message = f"{head[:10]} as {base[:10]} judges it"
    return commit_on_no_branch(repository, tree, [base, head], message)


def _runs(path: str) -> bool:
    return PurePosixPath(path).parts[1] != _SOURCES or path.endswith(".py")


def _notes(repository: Path, base: str, head: str, links: Sequence[str]) -> list[str]:
    notes = []
    outside = [path for path in _changed(repository, base, head) if not is_under_test(path)]
    if outside:
        notes.append(f"not judged: {_some(outside)} changed by head; measured with base's")
    if links:
        notes.append(f"left out: {_some(links)} of head, which a gate takes no links from")
    return notes


def _changed(repository: Path, base: str, head: str) -> list[str]:
    """Files of the program that head changes since it left base."""
    program = ("--", *PACKAGES, "ci")
    command = ("diff", "--name-only", "--no-renames", "--no-ext-diff", "-z")
    try:
        listed = git_output(repository, *command, f"{base}...{head}", *program)
    except GitError:  # no common ancestor
        listed = git_output(repository, *command, base, head, *program)
    return sorted(filter(None, listed.split("\0")))


def _some(paths: Sequence[str]) -> str:
    more = len(paths) - _NAMED
    named = (printable(path) for path in paths[:_NAMED])
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")
