"""Machine code of two commits of another repository, as their kernels compile it. Needs no GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from flexq_bench.errors import InfrastructureError
from flexq_bench.kernels.runtime.files import temporary_folder
from flexq_bench.kernels.runtime.nvrtc import Build, Cubin
from flexq_bench.kernels.runtime.occupancy import TARGETS
from flexq_bench.measure.clean_environment import clean_environment
from flexq_bench.measure.launcher import FreshProcesses
from flexq_bench.measure.machine_code.comparison import (
    OnProgress,
    RevisionComparison,
    check_patterns,
    comparison_of_builds,
)
from flexq_bench.measure.machine_code.revision_builds import (
    Compiled,
    ListedBuild,
    read_code,
)
from flexq_bench.measure.program import LOAD_TIMEOUT_S, LOADER, program_root
from flexq_bench.measure.sandbox import Kind, available_kind, building
from flexq_bench.measure.worker_process import RefusedError, WorkerProcess, read_as_reply
from flexq_bench.repository.project import Project, ProjectRevision
from flexq_bench.repository.project_builds import built_tree

_COMPILE_TIMEOUT_S = 10 * LOAD_TIMEOUT_S


def compare_project_code(
    project: Project,
    base: ProjectRevision,
    head: ProjectRevision,
    *,
    patterns: Sequence[str] | None = None,
    targets: Sequence[str] = TARGETS,
    on_progress: OnProgress = lambda _done, _all: None,
) -> RevisionComparison:
    """Compare the cubins that the kernels of a project report; see compare_revisions.

    project: with base's file, which says how both are built. A kernel is one build; its block size
    is not known, and therefore no occupancy. Kernels of a file or module that only base has count
    as removed. Raises BuildError if a commit does not build, InfrastructureError if kernels can't
    be imported there.
    """
    with ExitStack() as stack:
        codes = []
        labels: list[str] = []
        for side, revision in enumerate((base, head)):
            revision_labels, compiled = _compiled(
                stack, project, revision, targets, patterns, is_trusted=side == 0
            )
            labels += revision_labels
            codes.append(compiled)
            on_progress(side + 1, 2)
        check_patterns("kernel", patterns or (), labels)
        old, new = ({c.build.build.name: c.build for c in side.values()} for side in codes)
        return comparison_of_builds(
            (base.name, head.name),
            (old, new),
            targets,
            lambda _work: (codes[0], codes[1]),
        )


def _compiled(
    stack: ExitStack,
    project: Project,
    revision: ProjectRevision,
    targets: Sequence[str],
    patterns: Sequence[str] | None,
    *,
    is_trusted: bool,
) -> tuple[list[str], dict[tuple[str, str], Compiled]]:
    """The labels of all kernels, and the compiled code of those that match a pattern.

    The code is by label and target. A head's builds are not kept, and run in a sandbox where this
    machine allows one.
    """
    variables = None if is_trusted else stack.enter_context(clean_environment())
    kind: Kind = "none" if is_trusted else available_kind()
    built = built_tree(
        project.moved_to(revision.checkout),
        revision.checkout,
        variables=variables,
        isolated=None if variables is None else partial(building, variables, kind),
    )
    out = stack.enter_context(temporary_folder())
    answers: list[dict[str, str]] = []
    labels: list[str] = []
    for source in built.sources:
        if not is_trusted and source.is_file and not Path(source.place).is_file():
            continue  # head removed it, but base's file applies
        name = f"{revision.commit.sha[:10]} {Path(source.place).name}"
        environment = built.environment(variables)
        read = [Path(built.place.home), program_root()]
        with (
            building(environment, kind, out, read=read) as wrap,
            WorkerProcess(
                *(name, program_root(), LOADER),
                timeout_s=_COMPILE_TIMEOUT_S,
                environment=environment,
                launcher=FreshProcesses(wrap),
            ) as loader,
        ):
            try:
                reply = loader.ask(
                    "machine_code",
                    source=source.argument,
                    targets=list(targets),
                    out=str(out),
                    patterns=patterns if patterns is None else list(patterns),
                )
            except RefusedError as error:
                if not is_trusted and f"No module named {source.place!r}" in str(error):
                    continue
                raise InfrastructureError(str(error)) from error
        with read_as_reply(name):
            answers += [
                {str(name): str(value) for name, value in answer.items()}
                for answer in reply["compiled"]
            ]
            labels += map(str, reply["labels"])
    with read_as_reply(revision.commit.sha[:10]):
        by_label: dict[str, list[dict[str, str]]] = {}
        for answer in answers:
            by_label.setdefault(answer["kernel"], []).append(answer)
        compiled = {}
        for index, (label, of_label) in enumerate(by_label.items()):
            # The compiler has already run: equal code is equal for any sources.
            parts = [str(sorted(answer.items())) for answer in of_label]
            if any("error" in answer for answer in of_label):
                parts.append(revision.commit.sha)  # a failed compilation is equal to no other
            text = "\0".join(parts)
            identity = hashlib.sha256(text.encode()).hexdigest()
            build = ListedBuild(index, Build(label), (label,), (label,), identity)
            for answer in of_label:
                target = answer["target"]
                code = read_code(out, answer["code"]) if "code" in answer else None
                cubin = None if code is None else Cubin(label, target, code)
                compiled[label, target] = Compiled(build, target, cubin, answer.get("error", ""))
            for target in targets:
                none = Compiled(build, target, None, "it reported no machine code")
                compiled.setdefault((label, target), none)
    return labels, compiled
