"""Interleaved A/B measurement of two commits of another repository, by the same program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Unpack

from flexq_bench.kernels.errors import KernelError
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure.ab.course import compare_cases
from flexq_bench.measure.ab.experiment import ABExperiment, Options, Side
from flexq_bench.measure.ab.judged_sides import JudgingDevice, judged_pair, judging_device
from flexq_bench.measure.ab.rules import InterleaveRules
from flexq_bench.measure.ab.same_code import compare_briefly, is_same_project, without_measurement
from flexq_bench.measure.ab.unchanged_files import UnchangedFiles
from flexq_bench.measure.ab.worker_command import worker_command
from flexq_bench.measure.device import find_device
from flexq_bench.measure.external_kernels import adopted, described
from flexq_bench.measure.judged_kernel import ReferenceOf, Worker
from flexq_bench.measure.judged_places import JudgedPlace, judged_places, trees_built_in
from flexq_bench.measure.launcher import FreshProcesses, Launcher, forking_launcher
from flexq_bench.measure.program import program_root, sandbox_of
from flexq_bench.measure.sandbox import Kind, Sandbox, required_kind
from flexq_bench.measure.shared_tensors import Exchange, exchanges
from flexq_bench.measure.worker_process import RefusedError, WorkerError, WorkerProcess
from flexq_bench.repository.project import Project, ProjectRevision
from flexq_bench.repository.project_builds import BuiltTree, built_tree
from flexq_bench.verdicts import CaseComparison
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.probes import is_probe


def compare_project(
    project: Project,
    base: ProjectRevision,
    head: ProjectRevision,
    cases: Sequence[Case],
    *,
    own_files: bool = True,
    launcher: Launcher | None = None,
    **options: Unpack[Options],
) -> Iterator[CaseComparison]:
    """Compare two commits of a project; see compare_commits.

    Both sides run this program; kernels and their installed packages are each commit's own.
    own_files: each commit is built as its own project file says; False: as `project`'s. launcher:
    of both sides, in a sandbox where this machine allows one; None: one for each. Raises BuildError
    if a commit does not build.
    """
    find_device(options.get("device", "cuda"))
    with ExitStack() as stack:
        sides: dict[str, Side] = {}  # one of a commit that is compared with itself
        for revision in {base.name: base, head.name: head}.values():
            built = built_tree(
                project.at(revision.checkout) if own_files else project, revision.checkout
            )
            environment = built.environment()
            sandbox = sandbox_of(built.sources, environment, [Path(built.place.home)])
            forking = launcher or stack.enter_context(
                forking_launcher(program_root(), sandbox.wrap)
            )
            sides[revision.name] = _side(built, revision, environment, forking, sandbox)
        yield from compare_cases(
            [
                (ABExperiment(*matched, **options), [(case, case) for case in group])
                for matched, group in _by_source(sides[base.name], sides[head.name], cases)
            ]
        )


@dataclass(frozen=True, slots=True)
class JudgedProject:
    """A commit of a project and an unreviewed one, built in sandboxes and ready to be compared.

    revisions, built, sides: base's and head's.
    """

    project: Project
    revisions: tuple[ProjectRevision, ProjectRevision]
    built: tuple[BuiltTree, BuiltTree]
    sides: tuple[Side, Side]
    judge: JudgingDevice

    def compare(
        self, cases: Sequence[Case], **options: Unpack[Options]
    ) -> Iterator[CaseComparison]:
        """Compare the two, on the device that they were opened for; see compare_judged.

        This process checks results and times, and runs no code of either commit.
        """
        base, head = self.revisions
        # Probes are ours on both sides and are not judged.
        kernels = [case for case in cases if not is_probe(case.kernel)]
        is_other = base.commit.sha != head.commit.sha  # else the comparison measures noise
        same = kernels if is_other and is_same_project(self.project, base, head) else []
        pair = partial(judged_pair, judge=self.judge, believes_binary=False, same=same)
        unmeasured = without_measurement(same, base.commit.sha, head.commit.sha)
        yield from unmeasured.values()
        kernels = [case for case in kernels if case not in unmeasured]
        controls = self.judge.device.type != "cpu"
        experiment = partial(
            ABExperiment, **options, pair=pair, starts_ahead=False, controls_base=controls
        )
        groups = [
            (experiment(*matched), [(case, case) for case in group])
            for matched, group in _by_source(*self.sides, kernels)
        ]
        settled = {result.case: result for result in compare_briefly(groups if same else ())}
        yield from settled.values()
        yield from compare_cases(
            [
                (of_source, [pair for pair in pairs if pair[0] not in settled])
                for of_source, pairs in groups
            ]
        )


@contextmanager
def judged_project(
    project: Project,
    base: ProjectRevision,
    head: ProjectRevision,
    places: Mapping[str, JudgedPlace],
    built: Sequence[BuiltTree],
    *,
    device: str = "cuda",
) -> Iterator[JudgedProject]:
    """Make two commits of a project ready to be compared in their places.

    project: with base's file. built: base's and head's, by trees_built_in. Each side runs in a
    clean environment and a sandbox, with the variables of base's file. Raises DeviceError.
    """
    exchanged = {slot: place.exchange for slot, place in places.items()}
    with judging_device(device, exchanged) as judge, ExitStack() as references:
        sides = [
            _side(tree, revision, tree.environment(place.variables), place.launcher, place.sandbox)
            for tree, revision, place in zip(built, (base, head), places.values(), strict=True)
        ]
        if places["base"].sandbox.kind == "none":
            files = UnchangedFiles([Path(tree.place.home) for tree in built])
            judge = replace(judge, files=files)
        reference = _references(references, sides[0], places["base"].sandbox, device)
        judge = replace(judge, reference=reference)
        yield JudgedProject(
            project, (base, head), (built[0], built[1]), (sides[0], sides[1]), judge
        )


def compare_judged_project(
    project: Project,
    base: ProjectRevision,
    head: ProjectRevision,
    cases: Sequence[Case],
    *,
    sandbox: Kind | None = None,
    **options: Unpack[Options],
) -> Iterator[CaseComparison]:
    """Compare base with an unreviewed head, in a project; see judged_project and compare_judged."""
    kind = required_kind() if sandbox is None else sandbox  # before anything of the project is read
    device = options.get("device", "cuda")
    with (
        judged_places(project.file.variables, kind) as places,
        judged_project(
            *(project, base, head, places, trees_built_in(places, project, (base, head))),
            device=device,
        ) as judged,
    ):
        yield from judged.compare(cases, **options)


def _references(stack: ExitStack, base: Side, sandbox: Sandbox, device: str) -> ReferenceOf:
    """Workers with base's definitions of operations, started when they are needed.

    A worker that is measured can't be one: what it does between its turns makes it faster. The
    stack ends them.
    """
    sources_of = cache(lambda: _sources_by_label(base))
    known: dict[tuple[KernelSource, ...], tuple[Worker, Exchange]] = {}

    def reference(case: Case) -> tuple[Worker, Exchange]:
        sources = sources_of()(case.label)
        if sources not in known:
            (exchange,) = stack.enter_context(exchanges("reference")).values()
            own = replace(sandbox, read=[*sandbox.read, exchange.inputs], write=[exchange.outputs])
            side = replace(base, kernels_from=sources)
            worker = WorkerProcess(
                f"the reference of {base.short_name}",
                side.tree,
                (*worker_command(side.tree), "--device", device, *side.options),
                timeout_s=InterleaveRules().timeout_s,
                environment=side.environment,
                launcher=FreshProcesses(own.wrap),
            )
            known[sources] = stack.enter_context(worker), exchange
        return known[sources]

    return reference


def _by_source(
    base: Side, head: Side, cases: Sequence[Case]
) -> Iterator[tuple[tuple[Side, Side], list[Case]]]:
    """Divide cases so that a worker loads only the source that has their kernels.

    In one process, files in two folders would share modules of one name, for example `utils`.
    """
    sources_of = [_sources_by_label(side) for side in (base, head)]
    groups: dict[tuple[tuple[KernelSource, ...], ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(tuple(source_of(case.label) for source_of in sources_of), []).append(case)
    for (of_base, of_head), group in groups.items():
        yield (replace(base, kernels_from=of_base), replace(head, kernels_from=of_head)), group


def _sources_by_label(side: Side) -> Callable[[str], tuple[KernelSource, ...]]:
    """Return a function that gives the source of a kernel.

    For one that no source has: those that do not load, which may be the reason; for kernels of
    flexq-bench: all.
    """
    sources = side.kernels_from or ()
    if len(sources) < 2:
        return lambda _: sources
    owners: dict[str, KernelSource] = {}
    broken: list[KernelSource] = []
    for source in sources:
        labels = adopted().labels.get(source)
        if labels is None:
            try:
                kernels = described(source, environment=side.environment, launcher=side.launcher)
            except (RefusedError, WorkerError, KernelError):
                broken.append(source)
                continue
            labels = tuple(kernel.spec.label for kernel in kernels)
        for label in labels:
            owners.setdefault(label, source)

    def sources_of(label: str) -> tuple[KernelSource, ...]:
        if label in owners:
            return (owners[label],)
        return (
            tuple(source for source in broken if label.startswith(f"{source.prefix}.")) or sources
        )

    return sources_of


def _side(
    built: BuiltTree,
    revision: ProjectRevision,
    environment: Mapping[str, str],
    launcher: Launcher,
    sandbox: Sandbox,
) -> Side:
    return Side(
        revision.name,
        program_root(),
        environment,
        kernels_from=built.sources,
        launcher=launcher,
        sandbox=sandbox,
    )
