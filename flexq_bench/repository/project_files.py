"""Initial files of a project: its project file, and a workflow that gates pull requests."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from flexq_bench.errors import UsageError
from flexq_bench.kernels.external.sources import normalized
from flexq_bench.packages import PACKAGE
from flexq_bench.repository.git import run_git
from flexq_bench.repository.project import FILE, read_project_file
from flexq_bench.repository.project_builds import SOURCES
from flexq_bench.repository.worktrees import repository_of

WORKFLOW = Path(".github") / "workflows" / "flexq-bench.yml"
_API = "flexq_bench.api"
_TITLE = "FlexQ Bench"
_EXAMPLE = "kernels.py"

# Build commands by the files that they are for, the most specific first.
_BUILDS = {
    "setup.py": "python setup.py build_ext --inplace",
    "Makefile": "make",
    "CMakeLists.txt": "cmake -S . -B build && cmake --build build",
}

_PROJECT = """\
version = 1
name = "{name}"
kernels = [{kernels}]
suite = "smoke"  # shapes; or a .toml of this repository

[build]
# command = "{command}"
# environment = "pip"
# packages = ["-r", "requirements.txt"]
"""
_GATE = """\
# Compares each pull request with its base on one machine, interleaved, and fails where a kernel is
# slower or wrong. A GPU is a runner of your own: runs-on: [self-hosted, gpu].
name: TITLE
on: pull_request

permissions:
  contents: read

jobs:
  gate:
    runs-on: ubuntu-latest
    timeout-minutes: 60
    steps:
      - uses: actions/checkout@v4
        with:
          ref: ${{ github.event.pull_request.head.sha }}
          fetch-depth: 0
          persist-credentials: false
          submodules: recursive
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: pip install flexq-bench
      - name: Gate
        env:
          BASE: ${{ github.event.pull_request.base.sha }}
          HEAD: ${{ github.event.pull_request.head.sha }}
        run: |
          flexq-bench gate perf --project PROJECT --base "$BASE" --head "$HEAD" --markdown gate.md
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: gate
          path: gate.md
          if-no-files-found: ignore
"""


def write_first_files(folder: Path) -> list[Path]:
    """Write a project file into a folder and a workflow into its repository; return their paths.

    Kernels are the folder's tracked and new files that import the public module. If there are none,
    the project file names a file that is still to be written. Raises UsageError if the folder is in
    no git repository, or one of the files exists.
    """
    root, folder = repository_of(folder).resolve(), folder.resolve()
    inside = folder.relative_to(root)
    name = normalized(folder.name)
    # A repository may have several projects, so their checks need different names.
    workflow = WORKFLOW if folder == root else WORKFLOW.with_stem(f"{WORKFLOW.stem}-{name}")
    title = _TITLE if folder == root else f"{_TITLE} ({name})"
    gate = _GATE.replace("TITLE", title).replace("PROJECT", shlex.quote(str(inside)))
    files = {folder / FILE: _project_file(folder, name), root / workflow: gate}
    for path in files:
        if path.exists():
            raise UsageError(f"{path} is there already: edit it, or move it away")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return list(files)


def missing_kernels(folder: Path) -> list[str]:
    """Return the files named in a folder's project file that do not exist."""
    named = read_project_file(folder / FILE).kernels
    return [text for text in named if text.endswith(".py") and not (folder / text).is_file()]


def _project_file(folder: Path, name: str) -> str:
    # -z: without it, git quotes names.
    search = ("grep", "-z", "--files-with-matches", "--untracked", "--fixed-strings", _API)
    names = run_git(folder, *search, "--", "*.py").stdout.split("\0")
    # A virtual environment that git does not ignore contains this program.
    sources_found = [name for name in names if name and not _is_no_source(Path(name))]
    sources = [_source(folder, Path(name)) for name in sources_found or [_EXAMPLE]]
    kernels = ", ".join(json.dumps(source, ensure_ascii=False) for source in sources)
    return _PROJECT.format(name=name, kernels=kernels, command=_build_command(folder))


def _build_command(folder: Path) -> str:
    """A command that may build what the folder has; the file has it as a comment."""
    has = (command for file, command in _BUILDS.items() if (folder / file).is_file())
    return next(has, "make")


def _is_no_source(file: Path) -> bool:
    """Return True for files of installed packages, and for tests; they contain no kernels."""
    is_test = file.name.startswith(("test_", "conftest")) or file.stem.endswith("_test")
    return is_test or "site-packages" in file.parts


def _source(root: Path, file: Path) -> str:
    """Return a file as it is named in a project file.

    A file of a package is named as a module, so that its relative imports work; others by their
    path.
    """
    if file.parts[0] == SOURCES and file.parent != Path(SOURCES):
        # Folders there are packages, with or without __init__.py.
        return _module(file, Path(SOURCES))
    top = file.parent
    while (root / top / "__init__.py").is_file():
        top = top.parent
    # Modules are imported from these folders, see BuiltTree.environment.
    if top == file.parent or top not in (Path(), Path(SOURCES)):
        return str(file)
    return _module(file, top)


def _module(file: Path, top: Path) -> str:
    inside = file.relative_to(top).with_suffix("")
    parts = inside.parts[:-1] if inside.name == "__init__" else inside.parts
    # A module with the name of our package would be ours; names with a hyphen can't be imported.
    if parts[0] == PACKAGE or not all(map(str.isidentifier, parts)):
        return str(file)
    return ".".join(parts)
