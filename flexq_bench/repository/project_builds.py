"""Commits of a project, checked out and built once per tree, in the cache folder."""

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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from flexq_bench.errors import BrokenRevisionError
from flexq_bench.repository.build_imports import BuildPlace
from flexq_bench.repository.descendants import end_marked, new_mark
from flexq_bench.repository.git import git_output, run_git
from flexq_bench.repository.project import BuildTable, Project
from flexq_bench.repository.worktrees import worktree
from kernels.outside.sources import KernelSource
from kernels.runtime.files import cache_folder, only_process, write_atomically

SOURCES = "src"  # modules of a project are there, or beside its file
_DONE = "built.json"  # written last: a folder without it is rebuilt
_OUTPUT = "build.log"
_SHOWN = 200  # characters of a build's error
# A line that gives a reason, and lines that continue one.
_REASON = re.compile(r"\berror\b.*: |^\s*(\w+\.)*\w*Error: ", re.IGNORECASE)
_WRAPS = re.compile(r"^(make|ninja)\b|subprocess-exited-with-error|metadata-generation-failed")

_LFS = "version https://git-lfs.github.com/spec/v1"
_LFS_POINTER = re.compile(rf"{re.escape(_LFS)}\n(?:ext-.*\n)*oid sha256:([0-9a-f]{{64}})\n")
# Locations of names of packages without a [project] table.
_NAMES = {
    "setup.cfg": re.compile(r"^name\s*=\s*([\w.-]+)\s*$", re.MULTILINE),
    "setup.py": re.compile(r"""\bname\s*=\s*["']([\w.-]+)["']"""),
}

log = logging.getLogger(__name__)


class BuildError(BrokenRevisionError):
    """A commit that does not build; the message has the line of its output with the reason."""


@dataclass(frozen=True, slots=True)
class BuiltTree:
    """A checked-out and built commit.

    folder: the project's, with its files. site: folder of its installed packages; None: none.
    sources: of its kernels. place: from which its modules may be imported. variables: of the
    project's file.
    """

    folder: Path
    site: Path | None
    sources: tuple[KernelSource, ...]
    place: BuildPlace
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        """These variables (None: ours), updated for processes that run its kernels."""
        own = dict(os.environ if variables is None else variables)
        places = [self.folder, self.folder / SOURCES]
        if self.site is not None:
            # A package installed from the folder has its compiled modules, too. A release that a
            # dependency installed must not hide the commit's modules.
            places.insert(0 if _is_installed(self.folder, self.site) else 2, self.site)
        paths = [str(place) for place in places if place.is_dir()]
        python_path = own.get("PYTHONPATH")
        return {
            **own,
            **self.variables,
            **self.place.variables(),
            "PYTHONPATH": os.pathsep.join([*paths, *([python_path] if python_path else [])]),
        }


def built_tree(
    project: Project, commit: str, *, variables: Mapping[str, str] | None = None
) -> BuiltTree:
    """The tree of a commit, built as its project file says, or from the cache.

    variables: of the build; None: ours. The tree is in the cache folder that they name. Code that
    runs there may change it, so unreviewed code needs a cache of its own. Raises BuildError if it
    does not build, and any exception of the checkout.
    """
    tree = git_output(project.root, "rev-parse", f"{commit}^{{tree}}")
    own_cache = (variables or {}).get("FLEXQ_BENCH_CACHE")
    submodules, missing = _submodules(project.root, commit)
    for name in missing:
        _log_missing(commit, name)
    large, pointers = _large_files(project.root, commit)
    for name in pointers:
        _log_pointer(commit, name)
    missing += pointers
    home = _home(project, tree, missing, Path(own_cache) if own_cache else cache_folder())
    folder, site = home / "tree" / project.inside, home / "site"
    with only_process(home.with_suffix(".lock")):
        if not (home / _DONE).is_file():
            shutil.rmtree(home, ignore_errors=True)
            log.info("building %s of %s", commit[:10], project.name)
            _check_out(project, commit, home / "tree", submodules)
            for name, content in large.items():
                shutil.copyfile(content, home / "tree" / name)
            # Output of unreviewed code is deleted with the folder.
            output = None if own_cache else home / _OUTPUT
            build_variables = {
                **(os.environ if variables is None else variables),
                **project.file.variables,
            }
            _build(_Build(project.file.build, folder, commit, output), site, build_variables)
            write_atomically(home / _DONE, json.dumps({"tree": tree}).encode())
    sources = project.file.sources(folder)
    place = BuildPlace(
        home=os.path.realpath(home),
        builds=os.path.realpath(home.parent.parent),
        checkout=os.path.realpath(project.root),
        distribution=_distribution(folder),
    )
    has_site = site if site.is_dir() else None
    return BuiltTree(folder, has_site, sources, place, project.file.variables)


@cache  # once a process
def _log_missing(commit: str, submodule: str) -> None:
    log.warning(
        "%s: the submodule %s is not in this clone as that commit has it: "
        "git submodule update --init --recursive",
        *(commit[:10], submodule),
    )


@cache  # once a process
def _log_pointer(commit: str, file: str) -> None:
    log.warning(
        "%s: %s is a pointer of git-lfs, whose file is not in this clone: git lfs fetch --all",
        *(commit[:10], file),
    )


def _home(project: Project, tree: str, missing: list[str], cache: Path) -> Path:
    """Folder for a build, named by a hash of everything that affects its result."""
    table = project.file.build.model_dump_json()
    inputs = [json.dumps(project.file.variables, sort_keys=True)] if project.file.variables else []
    identity = [str(project.root), str(project.inside), tree, *missing, table, sys.version, *inputs]
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32]
    return cache / "projects" / project.name / key


def _submodules(
    root: Path, commit: str, above: Path = Path()
) -> tuple[list[tuple[Path, str, Path]], list[str]]:
    """Submodules of a commit, recursively: the repository, commit and path of each.

    Also returns the paths of those that this clone does not have.
    """
    there: list[tuple[Path, str, Path]] = []
    missing: list[str] = []
    for entry in git_output(root, "ls-tree", "-r", "-z", commit).split("\0"):
        about, _, name = entry.partition("\t")
        if not about.startswith("160000 "):
            continue
        repository, sha, path = root / name, about.split()[2], above / name
        has = ("cat-file", "-e", f"{sha}^{{commit}}")
        if not (repository / ".git").exists() or run_git(repository, *has).returncode:
            missing.append(str(path))
            continue
        inner, lost = _submodules(repository, sha, path)
        there += [(repository, sha, path), *inner]
        missing += lost
    return there, missing


def _large_files(root: Path, commit: str) -> tuple[dict[str, Path], list[str]]:
    """git-lfs files of a commit with their contents in this clone, and those without contents.

    No program of git-lfs is run.
    """
    contents: dict[str, Path] = {}
    missing: list[str] = []
    search = ("grep", "-z", "-l", "-I", "--full-name", "-F", "-e", _LFS, commit)
    for entry in run_git(root, *search).stdout.split("\0"):
        name = entry.removeprefix(f"{commit}:")
        pointer = git_output(root, "cat-file", "blob", f"{commit}:{name}") if name else ""
        oid = _LFS_POINTER.match(pointer)
        if oid is None:
            continue  # text about pointers
        content = Path("lfs", "objects", oid[1][:2], oid[1][2:4], oid[1])
        path = Path(git_output(root, "rev-parse", "--git-common-dir")) / content
        path = root / path  # git prints it relative to the folder
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
        # A copy that is built in place, because builds keep absolute paths. It has the files of the
        # repository and no history.
        shutil.copytree(checked_out, folder, symlinks=True, ignore=_without_git)
    # A worktree has empty folders in their place.
    for repository, sha, path in submodules:
        with tempfile.TemporaryDirectory() as scratch:
            index = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
            git_output(repository, "read-tree", sha, environment=index)
            written = ("checkout-index", "--all", "--force", f"--prefix={folder / path}{os.sep}")
            git_output(repository, *written, environment=index)


def _without_git(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == ".git"]


@dataclass(frozen=True, slots=True)
class _Build:
    """output: file for the output of a failed build; None: none is written."""

    table: BuildTable
    folder: Path
    commit: str
    output: Path | None


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
    """Return variables for packages that take their version from git, which a built tree lacks."""
    package = _package_table(folder)
    if "version" not in package.get("dynamic", ()) or not isinstance(package.get("name"), str):
        return {}
    name = re.sub(r"[-_.]+", "_", package["name"]).upper()
    return {f"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_{name}": "0"}


def _package_table(folder: Path) -> Mapping[str, Any]:
    """The table `project` of a pyproject.toml; empty: no package, or an invalid one.

    The build reports what is wrong with an invalid one.
    """
    try:
        table = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return table if isinstance(table, dict) else {}


def _distribution(folder: Path) -> str:
    """The name of the package in a folder; empty: none, or one whose name is computed."""
    name = _package_table(folder).get("name")
    if isinstance(name, str):
        return name
    for file, pattern in _NAMES.items():
        try:
            match = pattern.search((folder / file).read_text("utf-8", "replace"))
        except OSError:
            continue
        if match:
            return match[1]
    return ""


def _is_installed(folder: Path, site: Path) -> bool:
    """Return True if a package of this folder was installed into `site`, and not editable."""
    for path in site.glob("*.dist-info/direct_url.json"):
        try:
            url = json.loads(path.read_text("utf-8"))
            place = Path(unquote(urlsplit(url["url"]).path))
            if not url["dir_info"].get("editable") and place.resolve() == folder.resolve():
                return True
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # of an archive, or of a repository
    return False


def _run(
    command: list[str],
    build: _Build,
    environment: Mapping[str, str],
) -> None:
    does_not = f"{build.commit[:10]} does not build"
    timeout_s = build.table.timeout_s
    mark = new_mark()
    try:
        process = subprocess.Popen(
            command,
            cwd=build.folder,
            env={**environment, mark: "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its children end with it
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        hint = ': pip install uv, or take environment = "pip"' if command[0] == "uv" else ""
        raise BuildError(f"{does_not}: {command[0]}: {error.strerror}{hint}") from error
    with process:
        try:
            log, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise BuildError(f"{does_not} in {timeout_s:g} s") from None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            end_marked(mark)  # also those in other sessions
    if process.returncode:
        where = ""
        if build.output is not None:
            build.output.write_text(log, "utf-8")
            where = f" (its output: {build.output})"
        raise BuildError(f"{does_not}: {_reason(log, process.returncode)}{where}")


def _reason(log: str, code: int) -> str:
    """The first line of a build's output that gives a reason, otherwise the last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reasons = (line for line in lines if _REASON.search(line) and not _WRAPS.search(line))
    return next(reasons, lines[-1] if lines else f"exit code {code}")[:_SHOWN]
