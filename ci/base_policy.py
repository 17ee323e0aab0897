"""Load a policy and its suite from a commit instead of the working tree."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from flexq_bench.ci.policy import Policy, find_policy, is_path, read_policy
from flexq_bench.repository.git import git_output
from flexq_bench.workloads.errors import WorkloadError

_POLICIES, _SUITES = Path("ci/policies"), Path("workloads/suites")
_FILE_MODES = ("100644", "100755")


def load_policy_of(repository: Path, commit: str, name_or_path: str) -> Policy:
    """Load the policy from a commit, so that edits of a pull request have no effect.

    A name is looked up in the commit, then among the bundled policies. A path inside the repository
    is read from the commit, a path outside from the file system. The same holds for the policy's
    suite. Raises WorkloadError as load_policy does, and if the
    commit has no such file.
    """
    with tempfile.TemporaryDirectory() as name:
        files = _Files(repository, commit, Path(name))
        if is_path(name_or_path):
            policy = read_policy(
                files.locate(Path(name_or_path)), locate=files.locate, suites=files.suites
            )
        else:
            committed = files.folder / _POLICIES / f"{name_or_path}.toml"
            file = committed if committed.is_file() else find_policy(name_or_path)
            policy = read_policy(file, locate=files.locate, suites=files.suites)
    return policy


class _Files:
    """The `.toml` files of a commit, written to a folder."""

    def __init__(self, repository: Path, commit: str, folder: Path) -> None:
        self.folder = folder
        self._repository, self._commit = repository.resolve(), commit
        listed = git_output(repository, "ls-tree", "-r", "-z", "--full-tree", commit)
        for line in filter(None, listed.split("\0")):
            metadata, _, path = line.partition("\t")
            mode, _, name = metadata.split(" ")
            if mode in _FILE_MODES and path.endswith(".toml"):
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(git_output(repository, "cat-file", "blob", name), "utf-8")

    @property
    def suites(self) -> Path | None:
        """Folder of the commit's suites; None: it has none, so the bundled ones are used."""
        folder = self.folder / _SUITES
        return folder if folder.is_dir() else None

    def locate(self, path: Path) -> Path:
        """Return the path to read a file from. Raises WorkloadError if the commit lacks it."""
        if path.is_relative_to(self.folder):
            inside = Path(os.path.normpath(path)).relative_to(self.folder)
        else:
            # As written and with symbolic links resolved: a link must not lead out of the commit.
            spellings = Path(os.path.abspath(path)), path.resolve()
            inside_paths = [p for p in spellings if p.is_relative_to(self._repository)]
            if not inside_paths:
                return path
            inside = inside_paths[0].relative_to(self._repository)
        if not (self.folder / inside).is_file():
            raise WorkloadError(
                f"{self._commit[:10]} has no {inside}: a gate reads base's, or a file outside of "
                "the repository; --trust-head reads what is here"
            )
        return self.folder / inside
