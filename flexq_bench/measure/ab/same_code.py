"""Cases whose code is the same in two commits, as this process finds: they need no measurement.

Compared are the files that a worker could run, not what a worker says of itself. Files may differ
in what neither Python nor the CUDA compiler sees: comments, blank lines, and docstrings, which
base's code, with which head's is equal then, is trusted not to run.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path, PurePosixPath

from flexq_bench.kernels.runtime.sources import included_files
from flexq_bench.measure.ab.course import CasesOfBoth, compare_cases
from flexq_bench.measure.ab.experiment import ABExperiment
from flexq_bench.measure.clean_environment import clean_environment
from flexq_bench.measure.machine_code.revision_builds import open_revision
from flexq_bench.repository.git import git_output, run_git
from flexq_bench.repository.project import Project, ProjectRevision
from flexq_bench.repository.worktrees import worktree
from flexq_bench.stats.baseline import BASELINE
from flexq_bench.verdicts import CaseComparison, Comparison, Verdict, confirm
from flexq_bench.verdicts.alert_rule import FEWEST_PLACEMENTS
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.probes import calibrates, is_probe

_MEASURED_SHARE = 0.1  # of the cases with the same code
_DEVICE_CODE = ("kernels", "csrc")
_MAX_COMPARED_BYTES = 1 << 20  # of a file, whose syntax tree takes hundreds of times as many
_TEXTS = (".md", ".rst")  # files of a repository that no build compiles
_C_SUFFIXES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp")
# Code that comments may change, or hide in: lines, raw strings, digits apart by quotation marks,
# and ends of lines about which compilers differ.
_NOT_PLAIN = re.compile(
    r"""\bassert\b|__LINE__|\bR"|\?\?/|[0-9a-fA-F]'[0-9a-fA-F]|\\[^\S\n]+\n|\r(?!\n)"""
)
# Strings and characters, which may contain the signs of a comment; comments; either without an end.
_CUDA_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<open>["']|/\*)""",
    re.DOTALL | re.VERBOSE,
)


def without_measurement(same: Collection[Case], base: str, head: str) -> dict[Case, CaseComparison]:
    """Results of cases with the same code, but for a random tenth of the kernels', which is to be
    measured.

    base, head: commits, which also seed the draw.
    """
    ordered = sorted(same, key=lambda case: case.key)
    draw = random.Random(f"{base} {head}")
    kernels = [case for case in ordered if not is_probe(case.kernel)]
    measured = {case for case in kernels if draw.random() < _MEASURED_SHARE}
    comparison = Comparison((), (), (), same_code=True)
    return {
        case: CaseComparison(case, base, head, comparison, confirm(comparison))
        for case in ordered
        if case not in measured
    }


def compare_briefly(
    experiments: Iterable[tuple[ABExperiment, CasesOfBoth]],
) -> Iterator[CaseComparison]:
    """Compare cases with the same code in one pair of processes; yield those that are the same.

    The others are to be compared as any case: processes may differ by chance.
    """
    brief = [
        (
            replace(
                experiment,
                rules=replace(experiment.rules, processes=1, placements=FEWEST_PLACEMENTS, looks=1),
                controls_base=False,
                on_result=None,
            ),
            pairs,
        )
        for experiment, pairs in experiments
    ]
    for result in compare_cases(brief):
        if result.confirmation.verdict is Verdict.SAME:
            yield result


def same_code(
    repository: Path,
    base: str,
    head: str,
    changed: Iterable[str],
    cases: Sequence[Case],
    *,
    is_cpu: bool,
) -> frozenset[Case]:
    """Cases whose kernels are the same code in two trees of this project.

    base, head: commits; base is trusted. changed: paths of all files that differ. A change of any
    Python or data file counts for all kernels, because all are imported by each process; a change
    of device code counts for the kernels that compile it. Raises InfrastructureError if git fails,
    or if base can't list its builds.
    """
    differing = [path for path in changed if not _is_same_file(repository, base, head, path)]
    if not all(map(_is_device_code, differing)):
        return frozenset()
    if is_cpu or not differing:
        return frozenset(cases)
    compiled = _kernels_that_compile(repository, base, head, differing)
    if compiled is None:
        return frozenset()
    # Changes of measured kernels are compared with those of the anchors.
    return frozenset(
        case
        for case in cases
        if case.label not in compiled and case.kernel != BASELINE and not calibrates(case.kernel)
    )


def is_same_project(project: Project, base: ProjectRevision, head: ProjectRevision) -> bool:
    """Return True if two commits of a project have the same code.

    All files of the repository count, but pages of text: a kernel, or its build, may read any.
    """
    trees = [
        {
            path: about.split()
            for about, _, path in (
                entry.partition("\t")
                for entry in git_output(
                    project.root, "ls-tree", "-r", "-z", "--full-tree", revision.checkout
                ).split("\0")
            )
            if path and not path.endswith(_TEXTS)
        }
        for revision in (base, head)
    ]
    if trees[0].keys() != trees[1].keys():
        return False
    commits = base.checkout, head.checkout
    return all(
        trees[1][path] == about
        or (
            trees[1][path][:2] == about[:2] == ["100644", "blob"]
            and _is_same_file(project.root, *commits, path)
        )
        for path, about in trees[0].items()
    )


def _is_device_code(path: str) -> bool:
    return PurePosixPath(path).parts[:2] == _DEVICE_CODE and not path.endswith(".py")


def _is_same_file(repository: Path, base: str, head: str, path: str) -> bool:
    texts = []
    for commit in (base, head):
        name = f"{commit}:{path}"
        size = run_git(repository, "cat-file", "-s", name)
        if size.returncode != 0 or int(size.stdout) > _MAX_COMPARED_BYTES:
            return False  # only one of them has it, or it is no source: a small object may expand
        shown = run_git(repository, "cat-file", "blob", name)
        if shown.returncode != 0:
            return False
        texts.append(shown.stdout)
    old, new = texts
    if path.endswith(".py"):
        return _same_python(old, new)
    return old == new or (
        path.endswith(_C_SUFFIXES) and _without_comments(old) == _without_comments(new)
    )


def _same_python(old: str, new: str) -> bool:
    try:
        return _python_tree(old) == _python_tree(new)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _python_tree(text: str) -> str:
    """The syntax tree without docstrings and positions."""
    tree = ast.parse(text.encode("utf-8", "surrogateescape"))
    for node in ast.walk(tree):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)


def _without_comments(text: str) -> tuple[str, ...]:
    """Lines of CUDA C++ that the compiler sees, with their tokens apart by at most one space.

    A text of which this is not certain is returned as it is.
    """
    joined = text.replace("\\\r\n", "").replace("\\\n", "")
    # The first token without an end is searched for alone: the time of more would be quadratic.
    if _NOT_PLAIN.search(joined) or any(match["open"] for match in _CUDA_TOKEN.finditer(joined)):
        return (text,)
    bare = _CUDA_TOKEN.sub(lambda token: _without_spaces(token["text"] or " "), joined)
    lines = (" ".join(line.split()) for line in bare.splitlines())
    return tuple(filter(None, lines))


def _without_spaces(literal: str) -> str:
    escaped = literal.encode("unicode_escape").decode("ascii")
    return literal if literal == " " else escaped.replace(" ", r"\x20")


def _kernels_that_compile(
    repository: Path, base: str, head: str, changed: Collection[str]
) -> frozenset[str] | None:
    """Labels of base's kernels whose builds include a changed file; None: it may be any."""
    with ExitStack() as stack:
        folders = [stack.enter_context(worktree(repository, commit)) for commit in (base, head)]
        environment = stack.enter_context(clean_environment())
        revision = stack.enter_context(open_revision(f"base {base[:10]}", folders[0], environment))
        revision.labels()
        builds = revision.builds()
        top = PurePosixPath(*_DEVICE_CODE)
        names = {str(PurePosixPath(path).relative_to(top)) for path in changed}
        files_of = {
            build.build.source: {
                name
                for folder in folders
                if (folder / top / build.build.source).is_file()
                for name in included_files(folder / top, build.build.source)
            }
            for build in builds
        }
    if not names <= set().union(*files_of.values()):  # compiled in another way, or not at all
        return None
    return frozenset(
        label
        for build in builds
        if files_of[build.build.source] & names
        for label in (*build.kernels, *build.default_of)
    )
