"""Commits of a project, checked out and built once for each tree, in the cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flexq_bench.errors import InfrastructureError
from flexq_bench.repository.git import git_output
from flexq_bench.repository.project import BuildTable, Project
from flexq_bench.repository.worktrees import worktree
from kernels.outside.sources import KernelSource
from kernels.runtime.files import cache_folder, only_process, write_atomically

SOURCES = "src"  # modules of a repository lie there, or at its root
_DONE = "built.json"  # written last: a folder without it is begun anew
_SHOWN = 200  # characters of what a build said last

log = logging.getLogger(__name__)


class BuildError(InfrastructureError):
    """A commit that does not build; the message has the last line of the build."""


@dataclass(frozen=True, slots=True)
class BuiltTree:
    """A commit that is checked out and built. folder: its files. site: what was installed for it;
    None: nothing. sources: of its kernels."""

    folder: Path
    site: Path | None
    sources: tuple[KernelSource, ...]

    def environment(self, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables of the processes that run its kernels, over these; None: ours."""
        own = dict(os.environ if variables is None else variables)
        places = [self.folder, self.folder / SOURCES, *([self.site] if self.site else [])]
        paths = [str(place) for place in places if place.is_dir()]
        others = own.get("PYTHONPATH")
        return {**own, "PYTHONPATH": os.pathsep.join([*paths, *([others] if others else [])])}


def built_tree(
    project: Project, commit: str, *, variables: Mapping[str, str] | None = None
) -> BuiltTree:
    """The tree of a commit, built as the project's file says; at once where it was built before.

    variables: of the build; None: ours. It lies in the cache folder that they name: what runs there
    may change it, and code that nobody reviewed must leave nothing for the runs after it. Raises
    BuildError if it does not build, and what checking it out raises.
    """
    tree = git_output(project.root, "rev-parse", f"{commit}^{{tree}}")
    own_cache = (variables or {}).get("FLEXQ_BENCH_CACHE")
    home = _home(project, tree, Path(own_cache) if own_cache else cache_folder())
    with only_process(home.with_suffix(".lock")):
        if not (home / _DONE).is_file():
            shutil.rmtree(home, ignore_errors=True)
            log.info("building %s of %s", commit[:10], project.name)
            _check_out(project, commit, home / "tree")
            _build(project.file.build, home, commit, variables)
            write_atomically(home / _DONE, json.dumps({"tree": tree}).encode())
    folder, site = home / "tree", home / "site"
    return BuiltTree(folder, site if site.is_dir() else None, project.file.sources(folder))


def _home(project: Project, tree: str, cache: Path) -> Path:
    """By all that decides what comes of a build."""
    identity = [str(project.root), tree, project.file.build.model_dump_json(), sys.version]
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32]
    return cache / "projects" / project.name / key


def _check_out(project: Project, commit: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with worktree(project.root, commit) as checked_out:
        # A copy, which is built where it stays: builds keep absolute paths. It has the files of
        # the repository and no history.
        shutil.copytree(checked_out, folder, symlinks=True, ignore=_without_git)


def _without_git(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == ".git"]


def _build(table: BuildTable, home: Path, commit: str, variables: Mapping[str, str] | None) -> None:
    environment = dict(os.environ if variables is None else variables)
    folder = home / "tree"
    if table.environment != "none" and table.packages:
        site = str(home / "site")
        installer = {
            "pip": (sys.executable, "-m", "pip", "install", "--quiet", "--target", site),
            "uv": ("uv", "pip", "install", "--python", sys.executable, "--target", site),
        }[table.environment]
        _run([*installer, *table.packages], folder, commit, environment, table.timeout_s)
        environment["PYTHONPATH"] = site
    if table.command:
        command = ["/bin/sh", "-c", table.command]
        _run(command, folder, commit, environment, table.timeout_s)


def _run(
    command: list[str],
    folder: Path,
    commit: str,
    environment: Mapping[str, str],
    timeout_s: float,
) -> None:
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # what it started ends with it
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise BuildError(f"{commit[:10]} does not build: {command[0]}: {error.strerror}") from error
    with process:
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise BuildError(f"{commit[:10]} does not build in {timeout_s:g} s") from None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last = (said.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise BuildError(f"{commit[:10]} does not build: {last[:_SHOWN]}")
