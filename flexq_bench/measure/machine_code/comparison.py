"""Comparison of two revisions' builds: which must be compiled, and which metrics differ."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from flexq_bench.errors import UsageError
from flexq_bench.kernels.runtime.files import cache_folder
from flexq_bench.kernels.runtime.machine_code import instructions, resources
from flexq_bench.kernels.runtime.nvrtc import Build, Cubin
from flexq_bench.kernels.runtime.occupancy import TARGETS
from flexq_bench.kernels.runtime.resource_row import resource_row
from flexq_bench.measure.clean_environment import clean_environment
from flexq_bench.measure.machine_code.metrics import (
    Difference,
    Function,
    Values,
    changed_metrics,
    instruction_values,
    resource_values,
)
from flexq_bench.measure.machine_code.revision_builds import (
    Compiled,
    ListedBuild,
    Revision,
    open_revision,
)
from flexq_bench.measure.sandbox import Kind, available_kind
from flexq_bench.repository.provenance import is_dirty
from flexq_bench.repository.working_tree import WORKING_TREE
from flexq_bench.repository.worktrees import refuse_local_changes, resolve_revision, worktree
from flexq_bench.workloads.names import unknown
from flexq_bench.workloads.patterns import matches, matches_any

OnProgress = Callable[[int, int], None]  # number compiled so far, number to compile
_Key = tuple[str, str]  # name of a build, target
Codes = tuple[Mapping[_Key, Compiled], Mapping[_Key, Compiled]]  # of base and head


@dataclass(frozen=True, slots=True)
class Broken:
    """A build of the head that does not compile: its results are missing."""

    build: str
    target: str
    kernels: tuple[str, ...]
    error: str


@dataclass(frozen=True, slots=True)
class RevisionComparison:
    """Differences of two revisions' machine code. Counts are of builds for one target each.

    same_source: not compiled, because the compiler's input is the same. same_code: compiled to the
    same machine code. uncompared: differing builds whose base does not compile. added, removed:
    builds that only the head, or only the base has. kernels: by build, the labels that may compile
    it.
    """

    base: str
    head: str
    targets: tuple[str, ...]
    same_source: int
    same_code: int
    differing: int
    uncompared: int
    added: int
    removed: int
    differences: tuple[Difference, ...]
    broken: tuple[Broken, ...]
    kernels: dict[str, tuple[str, ...]]


def short_name(revision: str) -> str:
    """The beginning of a sha, for people; the mark of a dirty tree is kept."""
    sha, dash, rest = revision.partition("-")
    return f"{sha[:10]}{dash}{rest}"


@dataclass(frozen=True, slots=True)
class BuildPair:
    """A build of head for a target, with that of base; base None: it has none."""

    base: ListedBuild | None
    head: ListedBuild
    target: str

    @property
    def is_same(self) -> bool:
        if self.base is None or self.base.identity != self.head.identity:
            return False
        # A base that doesn't declare its block yet is no reason to compile everything.
        return self.has_same_block or self.base.build.block is None

    @property
    def has_same_block(self) -> bool:
        return self.base is not None and self.base.build.block == self.head.build.block

    @property
    def is_a_default(self) -> bool:
        return bool(self.head.default_of or (self.base and self.base.default_of))


def compare_revisions(
    repository: Path,
    base: str,
    head: str,
    *,
    patterns: Sequence[str] | None = None,
    targets: Sequence[str] = TARGETS,
    on_progress: OnProgress = lambda _done, _all: None,
) -> RevisionComparison:
    """Compile the differing builds of two revisions and list the metrics that differ. Needs no GPU.

    base, head: as git understands them, or "." for the working tree with its local changes.
    patterns: labels or globs of kernels; None: all of them, with their variants. Raises UsageError
    for an unknown revision or kernel, or local changes on top of the head; InfrastructureError if a
    revision's own code fails.
    """
    with ExitStack() as stack:
        names, revisions = zip(
            *(
                _opened(stack, repository, side, written)
                for side, written in (("base", base), ("head", head))
            ),
            strict=True,
        )
        # Before builds are listed, which takes many times as long.
        labels = [label for revision in revisions for label in revision.labels()]
        check_patterns("kernel", patterns or (), labels)
        listed = [revision.builds() for revision in revisions]
        old, new = (chosen_builds(builds, patterns) for builds in listed)
        with_code = [label for builds in listed for build in builds for label in _labels(build)]
        check_patterns("kernel with code of ours", patterns or (), with_code)
        return comparison_of_builds(
            names, (old, new), targets, lambda work: _compile(revisions, work, on_progress)
        )


def comparison_of_builds(
    names: Sequence[str],
    builds: tuple[Mapping[str, ListedBuild], Mapping[str, ListedBuild]],
    targets: Sequence[str],
    codes_of: Callable[[Sequence[BuildPair]], Codes],
) -> RevisionComparison:
    """Compare the builds of two revisions.

    names, builds: of base and head. codes_of: returns the machine code of differing pairs, of both
    sides, by build and target.
    """
    old, new = builds
    bases = _bases(old, new)
    pairs = [
        BuildPair(bases.get(name), build, target)
        for name, build in new.items()
        for target in targets
        if build.build.runs_on(target)
    ]
    same = [pair for pair in pairs if pair.is_same]
    work = [pair for pair in pairs if not pair.is_same]
    codes = codes_of(work)
    same_code, differences, broken = _compared(work, codes)
    kept = {build.build.name for build in bases.values()}
    removed = [build for name, build in old.items() if name not in kept]
    return RevisionComparison(
        base=names[0],
        head=names[1],
        targets=tuple(targets),
        same_source=len(same),
        same_code=same_code,
        uncompared=sum(
            pair.base is not None and codes[0][pair.base.build.name, pair.target].cubin is None
            for pair in work
        ),
        differing=sum(pair.base is not None for pair in work) - same_code,
        added=sum(pair.base is None for pair in work),
        removed=sum(build.build.runs_on(target) for build in removed for target in targets),
        differences=tuple(differences),
        broken=tuple(broken),
        kernels={name: build.kernels for name, build in new.items()},
    )


def _opened(stack: ExitStack, repository: Path, side: str, written: str) -> tuple[str, Revision]:
    """Open a revision. Return its name and its process, which starts to list its builds at once."""
    if written == WORKING_TREE:
        head = resolve_revision(repository, "HEAD")
        name, folder = (f"{head}-dirty" if is_dirty(repository) else head), repository
    else:
        name = resolve_revision(repository, written)
        # A full id never means the working tree.
        if side == "head" and written != name:
            refuse_local_changes(repository, name)
        folder = stack.enter_context(worktree(repository, name))
    environment = stack.enter_context(clean_environment())
    kind: Kind = "none"
    if side == "base" or written == WORKING_TREE:
        # Nothing may read a head's compiled code later; these two are trusted.
        environment["FLEXQ_BENCH_CACHE"] = str(cache_folder().absolute())
    else:
        kind = available_kind()
    revision = open_revision(f"{side} {short_name(name)}", folder, environment, sandbox=kind)
    return name, stack.enter_context(revision)


def chosen_builds(
    builds: Iterable[ListedBuild], patterns: Sequence[str] | None
) -> dict[str, ListedBuild]:
    """By name, the builds whose kernels' labels match a pattern; None: all."""
    return {
        listed.build.name: listed
        for listed in builds
        if patterns is None or any(matches_any(patterns, label) for label in _labels(listed))
    }


def _bases(
    old: Mapping[str, ListedBuild], new: Mapping[str, ListedBuild]
) -> dict[str, ListedBuild]:
    """The base of each head build by its name.

    It is the build of the same name or, if its source was moved or renamed, the remaining one with
    the same function and defines (see _moved_key).
    """
    bases = {name: old[name] for name in new if name in old}
    unmatched = _by_moved_key(build for name, build in old.items() if name not in new)
    added = _by_moved_key(build for name, build in new.items() if name not in old)
    for key, builds in added.items():
        if len(builds) == len(unmatched.get(key, ())) == 1:  # otherwise they can't be distinguished
            bases[builds[0].build.name] = unmatched[key][0]
    return bases


def _by_moved_key(builds: Iterable[ListedBuild]) -> dict[object, list[ListedBuild]]:
    groups: dict[object, list[ListedBuild]] = {}
    for build in builds:
        groups.setdefault(_moved_key(build), []).append(build)
    return groups


def _moved_key(listed: ListedBuild) -> object:
    """Return the key of a build that stays the same when its source moves.

    It consists of main function and defines; without a main function, of the kernels that use the
    build and defines.
    """
    build = listed.build
    return build.block.function if build.block else listed.kernels, build.defines


def _labels(listed: ListedBuild) -> tuple[str, ...]:
    return (*listed.kernels, *listed.default_of)


def check_patterns(kind: str, patterns: Sequence[str], labels: Iterable[str]) -> None:
    """Raise UsageError for a pattern that no label matches. kind: of the labels."""
    known = sorted(set(labels))
    for pattern in patterns:
        if not any(matches(pattern, label) for label in known):
            raise UsageError(unknown(kind, pattern, known))


def _compile(
    revisions: Sequence[Revision], work: Sequence[BuildPair], on_progress: OnProgress
) -> tuple[dict[_Key, Compiled], dict[_Key, Compiled]]:
    """Machine code of both sides by build and target; both processes compile at the same time."""
    builds_by_side = (
        [(pair.base, pair.target) for pair in work if pair.base is not None],
        [(pair.head, pair.target) for pair in work],
    )
    for revision, items in zip(revisions, builds_by_side, strict=True):
        revision.start(items)
    total, done = sum(map(len, builds_by_side)), 0
    codes: tuple[dict[_Key, Compiled], dict[_Key, Compiled]] = ({}, {})
    for revision, side_codes in zip(revisions, codes, strict=True):
        for compiled in revision.compiled():
            side_codes[compiled.build.build.name, compiled.target] = compiled
            done += 1
            on_progress(done, total)
    return codes


def _compared(
    work: Sequence[BuildPair],
    codes: Codes,
) -> tuple[int, list[Difference], list[Broken]]:
    """Count builds with the same machine code; list differences and builds that do not compile."""
    same_code = 0
    broken: list[Broken] = []
    differing: list[tuple[BuildPair, Cubin | None, Cubin]] = []
    for pair in work:
        key = (pair.head.build.name, pair.target)
        before = codes[0][pair.base.build.name, pair.target].cubin if pair.base else None
        after = codes[1][key].cubin
        if after is None:
            broken.append(Broken(*key, pair.head.kernels, codes[1][key].error))
        elif before and before.code == after.code and pair.has_same_block:
            same_code += 1
        else:
            differing.append((pair, before, after))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each thread waits for a tool
        parts = pool.map(lambda d: _differences(*d), differing)
        return same_code, [difference for part in parts for difference in part], broken


def _differences(pair: BuildPair, before: Cubin | None, after: Cubin) -> list[Difference]:
    # Disassembling takes time, so instructions are counted only in defaults that have a base.
    counted = pair.is_a_default and before is not None
    old = _functions(pair.base.build, before, counted) if pair.base and before else {}
    new = _functions(pair.head.build, after, counted)
    return [
        difference
        for name, values in new.items()
        for difference in changed_metrics(
            old.get(name), values, Function(pair.head.build.name, pair.target, name)
        )
    ]


def _functions(build: Build, cubin: Cubin, is_counted: bool) -> dict[str, Values]:
    """The metrics of each function."""
    counts = instructions(cubin) if is_counted else {}
    return {
        name: resource_values(resource_row(build, cubin.arch, name, usage))
        | (instruction_values(counts[name]) if name in counts else {})
        for name, usage in resources(cubin).items()
    }
