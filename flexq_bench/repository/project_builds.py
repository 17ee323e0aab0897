"""Builds of a project's commits: checked out and built once per tree, in the cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from flexq_bench.errors import BrokenRevisionError
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.kernels.runtime.files import (
    cache_folder,
    only_process,
    read_regular,
    remove_tree,
    write_atomically,
)
from flexq_bench.repository.benchmark_files import write_benchmarks
from flexq_bench.repository.build_imports import BuildPlace
from flexq_bench.repository.descendants import end_marked, new_mark
from flexq_bench.repository.git import git_output, refuse_large_tree, run_git, without_filters
from flexq_bench.repository.project import BuildTable, Project
from flexq_bench.repository.worktrees import worktree

# In the environment of kernels: where their files are from, if they are not the commit's own.
BENCHMARKS_VARIABLE = "FLEXQ_BENCH_BENCHMARKS_FROM"
SOURCES = "src"  # folder of a project's modules, if they are not next to its file
_CACHE = "FLEXQ_BENCH_CACHE"
_DONE = "built.json"  # written last: without it, a build is started again
_OUTPUT = "build.log"
_PACKING_S = 120.0  # for a build to be packed, and sent to other machines
_MAX_OUTPUT_BYTES = 1 << 24  # of a build that failed; the rest is not shown
_MAX_LINE_LENGTH = 2000  # characters of a line in which a reason is searched
_MAX_REASON_LENGTH = 200  # maximum characters of the reason of a failure
# Lines that give a reason, and lines that only wrap another error.
_REASON = re.compile(r"\berror\b.*: |^\s*(\w+\.)*\w*Error: ", re.IGNORECASE)
_NEEDS_NETWORK = re.compile(r"resol(?:ve|ution)|unreachable|connection|no matching distr", re.I)
_WRAPS = re.compile(r"^(make|ninja)\b|subprocess-exited-with-error|metadata-generation-failed")

_PACKAGE = re.compile(r"[A-Za-z0-9._-]+")
_MAX_TEXT_BYTES = 1 << 20  # of a file that describes a package
# Errors of reading a file that anybody may have written.
_INVALID = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
_LFS = "version https://git-lfs.github.com/spec/v1"
_LFS_POINTER = re.compile(rf"{re.escape(_LFS)}\n(?:ext-.*\n)*oid sha256:([0-9a-f]{{64}})\n")
# Files with the names of packages that have no [project] table.
_NAMES = {
    "setup.cfg": re.compile(r"^name\s*=\s*([\w.-]+)\s*$", re.MULTILINE),
    "setup.py": re.compile(r"""\bname\s*=\s*["']([\w.-]+)["']"""),
}

log = logging.getLogger(__name__)


class BuildError(BrokenRevisionError):
    """A commit does not build. The message contains the line of the output with the reason."""


@dataclass(frozen=True, slots=True)
class BuiltTree:
    """A commit that is checked out and built.

    folder: of the project, with its files. site: folder of the packages installed for it; None:
    there are none. sources: of its kernels. place: where its modules may be imported from.
    variables: those of the project file.
    """

    folder: Path
    site: Path | None
    sources: tuple[KernelSource, ...]
    place: BuildPlace
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of processes that run its kernels.

        variables: the environment to extend; None: that of this process.
        """
        own = dict(os.environ if variables is None else variables)
        places = [self.folder, self.folder / SOURCES]
        if self.site is not None:
            # An installation of the folder itself also has the compiled modules, so it comes
            # first. A release that was installed as a dependency must not hide the commit.
            places.insert(0 if _is_installed(self.folder, self.site) else 2, self.site)
        paths = [str(place) for place in places if place.is_dir()]
        python_path = own.get("PYTHONPATH")
        return {
            **own,
            **self.variables,
            **self.place.variables(),
            "PYTHONPATH": os.pathsep.join([*paths, *([python_path] if python_path else [])]),
        }


# Of a folder to write to and permission to use the network: a context in which a function changes
# the command lines of a build, for example so that they run in a sandbox.
Isolated = Callable[[Path, bool], AbstractContextManager[Callable[[Sequence[str]], Sequence[str]]]]


class SharedBuilds(Protocol):
    """Builds that several machines share."""

    def building(self, home: Path, limit_s: float) -> AbstractContextManager[bool]:
        """A context whose block makes a build in `home`; True: it is there already.

        limit_s: longest time of making it.
        """
        ...


_shared: SharedBuilds | None = None


def share_builds(shared: SharedBuilds | None) -> None:
    """Share the builds of reviewed commits of this process; None: don't."""
    global _shared
    _shared = shared


def built_tree(
    project: Project,
    commit: str,
    *,
    variables: Mapping[str, str] | None = None,
    isolated: Isolated | None = None,
) -> BuiltTree:
    """Return the tree of a commit, built as configured in the project file; cached if it was built.

    variables: environment of the build; None: that of this process. The tree is stored in the cache
    folder of that environment. Unreviewed code gets a cache folder of its own, because code that
    runs in the tree can change it, and must not affect later runs. isolated: for the commands of
    unreviewed code; None: they run as they are. Raises BuildError if the commit does not build, and
    exceptions of checking it out.
    """
    tree = git_output(project.root, "rev-parse", f"{commit}^{{tree}}")
    own_cache = (variables or {}).get(_CACHE)
    submodules, missing = submodules_of(project.root, commit)
    for name in missing:
        _log_missing(commit, name)
    large, pointers = large_files_of(project.root, commit)
    for name in pointers:
        _log_pointer(commit, name)
    missing += pointers
    home = _home(project, tree, missing, folder_of_builds(variables))
    folder, site = home / "tree" / project.inside, home / "site"
    with only_process(home.with_suffix(".lock")):
        if not (home / _DONE).is_file():
            remove_tree(home)
            table = project.file.build
            is_shared = isolated is None and own_cache is None and (table.command or table.packages)
            sharing = (
                _shared.building(home, _PACKING_S + table.timeout_s)
                if is_shared and _shared is not None
                else nullcontext(False)
            )
            with sharing as is_there:
                if not is_there:
                    log.info("building %s of %s", commit[:10], project.name)
                    _check_out(project, commit, home / "tree", submodules)
                    for name, content in large.items():
                        shutil.copyfile(content, home / "tree" / name)
                    if project.benchmarks is not None:
                        write_benchmarks(project.benchmarks, home / "tree")
                        folder.mkdir(parents=True, exist_ok=True)
                    # The output of unreviewed code is removed with its folder, so it is not kept.
                    output = None if own_cache else home / _OUTPUT
                    own = {
                        **(os.environ if variables is None else variables),
                        **project.file.variables,
                    }
                    with (
                        nullcontext(tuple) if isolated is None else isolated(home, table.network)
                    ) as wrap:
                        _build(_Build(table, folder, commit, output, wrap), site, own)
                    write_atomically(home / _DONE, json.dumps({"tree": tree}).encode())
    sources = project.file.sources(folder)
    place = BuildPlace(
        home=os.path.realpath(home),
        builds=os.path.realpath(home.parent.parent),
        checkout=os.path.realpath(project.root),
        distribution=_distribution(folder),
    )
    has_site = site if site.is_dir() else None
    variables_of_kernels = {**project.file.variables}
    if project.benchmarks is not None:
        variables_of_kernels[BENCHMARKS_VARIABLE] = project.benchmarks.origin
    return BuiltTree(folder, has_site, sources, place, variables_of_kernels)


@cache  # once per process
def _log_missing(commit: str, submodule: str) -> None:
    log.warning(
        "%s: the submodule %s is not in this clone as that commit has it: "
        "git submodule update --init --recursive",
        *(commit[:10], submodule),
    )


@cache  # once per process
def _log_pointer(commit: str, file: str) -> None:
    log.warning(
        "%s: %s is a pointer of git-lfs, whose file is not in this clone: git lfs fetch --all",
        *(commit[:10], file),
    )


def folder_of_builds(variables: Mapping[str, str] | None = None) -> Path:
    """The folder of all builds, which exists. variables: see built_tree."""
    own_cache = (variables or {}).get(_CACHE)
    folder = (Path(own_cache) if own_cache else cache_folder()) / "projects"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _home(project: Project, tree: str, missing: list[str], builds: Path) -> Path:
    """Return the folder of a build, named by a hash of everything that affects the build."""
    table = project.file.build.model_dump_json()
    inputs = [json.dumps(project.file.variables, sort_keys=True)] if project.file.variables else []
    inputs += [] if project.benchmarks is None else [project.benchmarks.digest]
    identity = [str(project.inside), tree, *missing, table, sys.version, *inputs]
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32]
    return builds / project.name / key


def submodules_of(
    root: Path, commit: str, above: Path = Path()
) -> tuple[list[tuple[Path, str, Path]], list[str]]:
    """Find the submodules of a commit, including nested ones.

    Returns the repository, commit and path of each, and the paths of those that are not in this
    clone.
    """
    there: list[tuple[Path, str, Path]] = []
    missing: list[str] = []
    refuse_large_tree(root, commit)
    for entry in git_output(root, "ls-tree", "-r", "-z", commit).split("\0"):
        about, _, name = entry.partition("\t")
        if not about.startswith("160000 "):
            continue
        repository, sha, path = root / name, about.split()[2], above / name
        has = ("cat-file", "-e", f"{sha}^{{commit}}")
        if not (repository / ".git").exists() or run_git(repository, *has).returncode:
            missing.append(str(path))
            continue
        inner, lost = submodules_of(repository, sha, path)
        there += [(repository, sha, path), *inner]
        missing += lost
    return there, missing


def large_files_of(root: Path, commit: str) -> tuple[dict[str, Path], list[str]]:
    """Find the files of a commit that are stored in git-lfs, without running git-lfs.

    Returns the contents by name, and the names of files whose content is not in this clone.
    """
    contents: dict[str, Path] = {}
    missing: list[str] = []
    search = ("grep", "-z", "-l", "-I", "--full-name", "-F", "-e", _LFS, commit)
    for entry in run_git(root, *search).stdout.split("\0"):
        name = entry.removeprefix(f"{commit}:")
        pointer = git_output(root, "cat-file", "blob", f"{commit}:{name}") if name else ""
        oid = _LFS_POINTER.match(pointer)
        if oid is None:
            continue  # a text that mentions pointers
        content = Path("lfs", "objects", oid[1][:2], oid[1][2:4], oid[1])
        path = Path(git_output(root, "rev-parse", "--git-common-dir")) / content
        path = root / path  # the output of git is relative to the folder
        if path.is_file():
            contents[name] = path
        else:
            missing.append(name)
    return contents, missing


def _check_out(
    project: Project, commit: str, folder: Path, submodules: list[tuple[Path, str, Path]]
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with worktree(project.root, commit) as checked_out:
        # Builds contain absolute paths, so the copy is built at its final place. It has the files
        # of the repository without the history.
        shutil.copytree(checked_out, folder, symlinks=True, ignore=_without_git)
    # In a worktree, submodules are empty folders.
    for repository, sha, path in submodules:
        with tempfile.TemporaryDirectory() as scratch:
            index = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
            git_output(repository, "read-tree", sha, environment=index)
            written = ("checkout-index", "--all", "--force", f"--prefix={folder / path}{os.sep}")
            filters = without_filters(repository)
            git_output(repository, *filters, *written, environment=index)


def _without_git(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == ".git"]


@dataclass(frozen=True, slots=True)
class _Build:
    """A build in progress.

    output: file for the output of a failure; None: it is not stored. wrap: changes its commands.
    """

    table: BuildTable
    folder: Path
    commit: str
    output: Path | None
    wrap: Callable[[Sequence[str]], Sequence[str]]


def _build(build: _Build, site: Path, variables: Mapping[str, str]) -> None:
    table = build.table
    environment = {**variables, **_version_without_history(build.folder)}
    if table.environment != "none" and table.packages:
        installer = {
            "pip": (sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site)),
            "uv": ("uv", "pip", "install", "--python", sys.executable, "--target", str(site)),
        }[table.environment]
        _run([*installer, *table.packages], build, environment)
        environment["PYTHONPATH"] = str(site)
    if table.command:
        _run(["/bin/sh", "-c", table.command], build, environment)


def _version_without_history(folder: Path) -> dict[str, str]:
    """Return variables that set the version of packages that derive it from git history.

    A built tree has no history.
    """
    package = _package_table(folder)
    dynamic = package.get("dynamic")
    if not isinstance(dynamic, list) or "version" not in dynamic:
        return {}
    name = re.sub(r"[-_.]+", "_", package["name"]).upper()
    return {f"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_{name}": "0"}


def _package_table(folder: Path) -> Mapping[str, Any]:
    """Return the table `project` of pyproject.toml; empty: there is none, or its name is invalid.

    The build itself reports what is invalid.
    """
    try:
        table = tomllib.loads(_text_of(folder / "pyproject.toml"))["project"]
        return table if _PACKAGE.fullmatch(table["name"]) else {}
    except _INVALID:
        return {}


def _text_of(path: Path) -> str:
    return read_regular(path, _MAX_TEXT_BYTES).decode("utf-8", "replace")


def _distribution(folder: Path) -> str:
    """Return the name of the package in a folder; empty: there is none, or its name is computed."""
    if table := _package_table(folder):
        return str(table["name"])
    for file, pattern in _NAMES.items():
        try:
            match = pattern.search(_text_of(folder / file))
        except OSError:
            continue
        if match:
            return match[1]
    return ""


def _is_installed(folder: Path, site: Path) -> bool:
    """Return True if the package in this folder was installed into `site`, and not as editable."""
    for path in site.glob("*.dist-info/direct_url.json"):
        try:
            url = json.loads(_text_of(path))
            place = Path(unquote(urlsplit(url["url"]).path))
            if not url["dir_info"].get("editable") and place.resolve() == folder.resolve():
                return True
        except _INVALID:
            continue  # installed from an archive or a repository
    return False


def _run(
    command: list[str],
    build: _Build,
    environment: Mapping[str, str],
) -> None:
    does_not = f"{build.commit[:10]} does not build"
    timeout_s = build.table.timeout_s
    mark = new_mark()
    # A file, because a process that the command leaves behind would keep a pipe open.
    with tempfile.TemporaryFile() as written:
        try:
            process = subprocess.Popen(
                build.wrap(command),
                cwd=build.folder,
                env={**environment, mark: "1"},
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its process group can be killed
            )
        except OSError as error:
            hint = ': pip install uv, or take environment = "pip"' if command[0] == "uv" else ""
            raise BuildError(f"{does_not}: {command[0]}: {error.strerror}{hint}") from error
        with process:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise BuildError(f"{does_not} in {timeout_s:g} s") from None
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                end_marked(mark)  # also those in other sessions
        written.seek(0)
        output = written.read(_MAX_OUTPUT_BYTES).decode("utf-8", "replace")
    if process.returncode:
        where = ""
        if build.output is not None:
            build.output.write_text(output, "utf-8")
            where = f" (its output: {build.output})"
        if build.wrap is not tuple and not build.table.network and _NEEDS_NETWORK.search(output):
            where = " (it has no network unless base's file says `network = true` under [build])"
        raise BuildError(f"{does_not}: {_reason(output, process.returncode)}{where}")


def _reason(output: str, code: int) -> str:
    """Return the first line of a build's output that gives a reason, or else the last line."""
    lines = [line.strip()[:_MAX_LINE_LENGTH] for line in output.splitlines() if line.strip()]
    reasons = (line for line in lines if _REASON.search(line) and not _WRAPS.search(line))
    return next(reasons, lines[-1] if lines else f"exit code {code}")[:_MAX_REASON_LENGTH]
