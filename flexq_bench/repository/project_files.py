"""Initial files of a project: its project file, a suite, and workflows of GitHub Actions."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from flexq_bench.errors import FlexqError, UsageError
from flexq_bench.kernels.external.sources import normalized
from flexq_bench.packages import PACKAGE
from flexq_bench.repository.git import run_git
from flexq_bench.repository.project import FILE, read_project_file
from flexq_bench.repository.project_builds import SOURCES
from flexq_bench.repository.provenance import ROOT, package_version
from flexq_bench.repository.worktrees import repository_of

SUITE = Path("bench") / "suite.toml"
_MAX_GROUP = 1024  # values of K that share a scale; a larger common multiple is not a shape of use
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
suite = "{suite}"  # shapes

[build]
# command = "{command}"
# environment = "pip"
# packages = ["-r", "requirements.txt"]
"""
_SUITE = """\
description = "layers on which {name}'s kernels are timed"

[[group]]
kernels = ["{name}.*"]
m = "1,16"
shapes = ["{shapes}"]

# Kernels of other operations (flexq-bench list operations):
# [[cases]]
# operation = "attention_decode"
# kernels = ["{name}.*"]
# parameters = {{batch = 8, context = "1024,8192", heads = 32, kv_heads = 8}}
"""
# Where the program of workflows comes from: one variable in each file.
_INSTALL = """\
env:
  # An argument of pip: a version, the URL of a repository at a version, or a wheel's path.
  FLEXQ_BENCH: INSTALL
"""
_SET_UP = """\
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: pip install "$FLEXQ_BENCH"
"""
_GATE = (
    """\
# Compares each pull request with its base on one machine, interleaved, and fails where a kernel is
# slower or wrong; one comment, updated by each push. The job that runs the code has a token that
# reads, and the job that comments runs none of it.
name: TITLE
on: pull_request

permissions:
  contents: read

"""
    + _INSTALL
    + """
jobs:
  gate:
    # A self-hosted runner executes what a pull request brings, so forks are left out.
    if: github.event.pull_request.head.repo.full_name == github.repository
    runs-on: RUNNER
    timeout-minutes: 60
    steps:
      - uses: actions/checkout@v4
        with:
          ref: ${{ github.event.pull_request.head.sha }}
          fetch-depth: 0
          persist-credentials: false
          submodules: recursive
"""
    + _SET_UP
    + """\
      - name: Gate
        env:
          BASE: ${{ github.event.pull_request.base.sha }}
          HEAD: ${{ github.event.pull_request.head.sha }}
        # The checkout is the pull request's, which may have files and links of any name.
        working-directory: ${{ runner.temp }}
        run: |
          flexq-bench gate perf --project "$GITHUB_WORKSPACE"/PROJECT --base "$BASE" \\
            --head "$HEAD" --markdown gate.md --junit gate.xml
      - name: Summary
        if: always()
        working-directory: ${{ runner.temp }}
        run: |
          if [ -f gate.md ]; then cat gate.md >> "$GITHUB_STEP_SUMMARY"; fi
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: gate
          path: |
            ${{ runner.temp }}/gate.md
            ${{ runner.temp }}/gate.xml
          if-no-files-found: ignore

  comment:
    needs: gate
    if: ${{ !cancelled() && needs.gate.result != 'skipped' }}
    runs-on: ubuntu-latest
    permissions:
      pull-requests: write
    steps:
      - uses: actions/download-artifact@v4
        continue-on-error: true # there is none if nothing could be compared
        with:
          name: gate
      - name: Comment
        env:
          GH_TOKEN: ${{ github.token }}
          GH_REPO: ${{ github.repository }}
          NUMBER: ${{ github.event.pull_request.number }}
        run: |
          if [ ! -f gate.md ]; then exit 0; fi
          gh pr comment "$NUMBER" --body-file gate.md --edit-last --create-if-none
"""
)
_NIGHTLY = (
    """\
# Measures the newest commit every night, opens and closes alerts, and keeps the results: in the
# database whose URL is the secret FLEXQ_BENCH_DB, else in the cache of GitHub Actions.
name: TITLE, nightly
on:
  schedule:
    - cron: "17 1 * * *"
  workflow_dispatch:

permissions:
  contents: read

concurrency:
  group: flexq-bench-nightly
  cancel-in-progress: false

"""
    + _INSTALL
    + """
jobs:
  nightly:
    runs-on: RUNNER
    timeout-minutes: 240
    env:
      FLEXQ_BENCH_DB: ${{ secrets.FLEXQ_BENCH_DB || 'nights/flexq-bench.sqlite' }}
    steps:
      - uses: actions/checkout@v4
        with:
          fetch-depth: 0 # ancestry orders commits
          persist-credentials: false
          submodules: recursive
      - uses: actions/cache@v4
        with:
          path: nights
          key: flexq-bench-nights-${{ github.run_id }}
          restore-keys: flexq-bench-nights-
"""
    + _SET_UP
    + """\
      - name: Measure, confirm, report
        run: |
          mkdir -p nights report
          flexq-bench nightly --project PROJECT --report report
      - name: Summary
        if: always()
        run: |
          if [ -f report/nightly.md ]; then cat report/nightly.md >> "$GITHUB_STEP_SUMMARY"; fi
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: nightly
          path: |
            report
            nights
          if-no-files-found: ignore
"""
)
_WEIGHT = re.compile(r"""weight\s*=\s*["'][a-z]+[\d.a-z]*/(\d+)["']""")
_CPU_SHAPE, _GPU_SHAPES = (1024, 1024), ((4096, 4096), (4096, 11008))


@dataclass(frozen=True, slots=True)
class FirstFiles:
    """Files to write, by path. badge: Markdown for a README; empty: the remote is not known."""

    texts: Mapping[Path, str]
    badge: str


def default_install() -> str:
    """Return an argument of pip that installs this program as it was installed here.

    The URL and version that pip installed it from, or of the checkout that it runs or was installed
    from; without a remote, the checkout itself, which only this machine reaches. A version: it came
    from an index.
    """
    try:
        record = metadata.distribution("flexq-bench").read_text("direct_url.json")
        origin = json.loads(record) if record else {}
    except metadata.PackageNotFoundError:
        origin = {"url": ROOT.as_uri()}
    if "vcs_info" in origin:
        return f"flexq-bench @ git+{origin['url']}@{origin['vcs_info']['commit_id']}"
    if str(origin.get("url", "")).endswith(".whl"):
        return f"flexq-bench @ {origin['url']}"
    source = urlsplit(str(origin.get("url", "")))
    folders = [Path(unquote(source.path))] if source.scheme == "file" else []
    for checkout in (ROOT, *folders):
        commit = _commit_of(checkout)  # None: perhaps an environment within another repository
        if commit is not None:
            url = run_git(checkout, "remote", "get-url", "origin").stdout.strip()
            web = re.sub(r"^git@([^:]+):", r"https://\1/", url)
            place = web if web.startswith("https://") else checkout.as_uri()
            return f"flexq-bench @ git+{place}@{commit}"
    return f"flexq-bench @ {origin['url']}" if origin else f"flexq-bench=={package_version()}"


def _commit_of(checkout: Path) -> str | None:
    """Return the commit of a checkout; None: this folder is not the top of one."""
    try:
        ran = run_git(checkout, "rev-parse", "--show-toplevel", "HEAD")
    except FlexqError:
        return None
    top, _, commit = ran.stdout.strip().partition("\n")
    return commit if ran.returncode == 0 and Path(top) == checkout.resolve() else None


def first_files(folder: Path, install: str, *, gpu: bool) -> FirstFiles:
    """Return a project file, a suite, and workflows for pull requests and nights.

    Kernels are the folder's tracked and new files that import the public module. If there are none,
    the project file names a file that is still to be written. The suite's K is a multiple of the
    groups in which the kernels' weights are quantized. install: an argument of pip. gpu: workflows
    run on a runner with a GPU. Raises UsageError if the folder is in no git repository.
    """
    root, folder = repository_of(folder).resolve(), folder.resolve()
    inside = folder.relative_to(root)
    name = normalized(folder.name)
    # A repository may have several projects, so their checks need different names.
    suffix = "" if folder == root else f"-{name}"
    title = _TITLE if folder == root else f"{_TITLE} ({name})"
    values = {
        "TITLE": title,
        "PROJECT": shlex.quote(str(inside)),
        "INSTALL": json.dumps(install),
        "RUNNER": "[self-hosted, gpu]" if gpu else "ubuntu-latest",
    }

    def filled(template: str) -> str:
        return re.sub("|".join(values), lambda word: values[word[0]], template)

    workflows = root / ".github" / "workflows"
    nightly = workflows / f"flexq-bench{suffix}-nightly.yml"
    kernels = _kernel_files(folder)
    shapes = [
        f"{n}x{_multiple(k, _groups(folder, kernels))}"
        for n, k in (_GPU_SHAPES if gpu else (_CPU_SHAPE,))
    ]
    texts = {
        folder / FILE: _project_file(folder, name, kernels),
        folder / SUITE: _SUITE.format(name=name, shapes='", "'.join(shapes)),
        workflows / f"flexq-bench{suffix}.yml": filled(_GATE),
        nightly: filled(_NIGHTLY),
    }
    return FirstFiles(texts, _badge(root, nightly.name))


def write_first_files(folder: Path, install: str, *, gpu: bool = False) -> FirstFiles:
    """Write `first_files`. Raises UsageError if one of them exists; then nothing is written."""
    files = first_files(folder, install, gpu=gpu)
    for path in files.texts:
        if path.exists():
            raise UsageError(f"{path} is there already: edit it, or move it away")
    for path, text in files.texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return files


def missing_kernels(folder: Path) -> list[str]:
    """Return the files named in a folder's project file that do not exist."""
    named = read_project_file(folder / FILE).kernels
    return [text for text in named if text.endswith(".py") and not (folder / text).is_file()]


def _kernel_files(folder: Path) -> list[Path]:
    """Return the files that import the public module, relative to the folder."""
    # -z: without it, git quotes names.
    search = ("grep", "-z", "--files-with-matches", "--untracked", "--fixed-strings", _API)
    names = run_git(folder, *search, "--", "*.py").stdout.split("\0")
    # A virtual environment that git does not ignore contains this program.
    return [Path(name) for name in names if name and not _is_no_source(Path(name))]


def _groups(folder: Path, kernels: Sequence[Path]) -> list[int]:
    """Return the group sizes of the weights that the kernels declare."""
    sources = [(folder / file).read_text("utf-8", errors="replace") for file in kernels]
    return [int(size) for source in sources for size in _WEIGHT.findall(source)]


def _multiple(k: int, groups: Sequence[int]) -> int:
    """Return the smallest multiple of all group sizes that is at least k."""
    step = math.lcm(*groups) if groups and math.lcm(*groups) <= _MAX_GROUP else 1
    return -(-k // step) * step


def _badge(root: Path, workflow: str) -> str:
    try:
        url = run_git(root, "remote", "get-url", "origin").stdout.strip()
    except FlexqError:
        return ""
    web = re.sub(r"^git@([^:]+):", r"https://\1/", url).removesuffix(".git")
    address = f"{web}/actions/workflows/{workflow}"
    return f"[![kernels]({address}/badge.svg)]({address})" if web.startswith("https://") else ""


def _project_file(folder: Path, name: str, files: Sequence[Path]) -> str:
    sources = [_source(folder, file) for file in files or [Path(_EXAMPLE)]]
    kernels = ", ".join(json.dumps(source, ensure_ascii=False) for source in sources)
    return _PROJECT.format(
        name=name, kernels=kernels, suite=SUITE.as_posix(), command=_build_command(folder)
    )


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
