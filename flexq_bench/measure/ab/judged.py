"""A commit that is judged against its base: measured with base's meter, and not trusted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

from flexq_bench.errors import BrokenRevisionError, MissingResultsError
from flexq_bench.measure.ab.course import compare_cases
from flexq_bench.measure.ab.experiment import ABExperiment, Identity, Options, Side
from flexq_bench.measure.ab.judged_sides import judged_pair, judging_device
from flexq_bench.measure.ab.judged_tree import judged_tree
from flexq_bench.measure.ab.revisions import resolve_pair
from flexq_bench.measure.ab.same_code import compare_briefly, same_code, without_measurement
from flexq_bench.measure.ab.tree_bytecode import add_bytecode
from flexq_bench.measure.ab.unchanged_files import UnchangedFiles
from flexq_bench.measure.ab.worker_command import worker_command
from flexq_bench.measure.clean_environment import clean_environment
from flexq_bench.measure.launcher import OWN_LIBRARIES, forking_launcher
from flexq_bench.measure.own_secrets import hidden_secrets
from flexq_bench.measure.sandbox import Kind, Sandbox, required_kind
from flexq_bench.measure.shared_tensors import exchanges
from flexq_bench.measure.worker_messages import JUDGED_VERSION
from flexq_bench.measure.worker_process import WorkerProcess
from flexq_bench.repository.git import git_output
from flexq_bench.repository.worktrees import repository_of, worktree
from flexq_bench.verdicts import CaseComparison
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.probes import is_probe


def compare_judged(
    repository: Path,
    base: str,
    head: str,
    cases: Sequence[Case],
    *,
    sandbox: Kind | None = None,
    **options: Unpack[Options],
) -> Iterator[CaseComparison]:
    """Compare base with an unreviewed head; see compare_commits.

    Both sides are measured with base's program; only the code under test is head's (see
    judged_tree). Probes, to which the other kernels are compared, are base's on both sides. This
    process checks results and times (see judged_sides), and finds cases with the same code, most of
    which are not measured (see same_code). The workers of each side get a sandbox, and a clean
    environment with a private cache. sandbox: its kind; None: the one that this machine has. Raises
    MissingResultsError if base can't judge head, SandboxError if there is no sandbox.
    """
    kind = required_kind() if sandbox is None else sandbox
    repository = repository_of(repository)
    first, second = resolve_pair(repository, base, head)
    tree = judged_tree(repository, first.commit, second.commit)
    is_cpu = options.get("device", "cuda").startswith("cpu")
    same: Collection[Case] = ()
    if first.name != second.name:  # a commit compared with itself measures noise
        same = same_code(repository, first.commit, tree.commit, tree.changed, cases, is_cpu=is_cpu)
    runs_code_of_base = not tree.runs_code_of_head or len(cases) == len(same) > 0
    unmeasured = without_measurement(same, first.name, second.name)
    yield from unmeasured.values()
    cases = [case for case in cases if case not in unmeasured]
    if not cases:
        return
    with ExitStack() as stack:
        exchanged = stack.enter_context(exchanges("base", "head"))
        folder = stack.enter_context(worktree(repository, first.commit))
        trees = (folder, stack.enter_context(worktree(repository, tree.commit)))
        stack.enter_context(hidden_secrets())

        def side(name: str, slot: str, tree: Path) -> Side:
            environment = stack.enter_context(clean_environment())
            exchange = exchanged[slot]
            sandbox = Sandbox(environment, kind, [tree, exchange.inputs], [exchange.outputs])
            # Head's code is not trusted with what its processes are forked from.
            program = tree if slot == "base" or runs_code_of_base else None
            *_, worker = worker_command(tree) if options.get("command") is None else ("",)
            launcher = stack.enter_context(
                forking_launcher(
                    program,
                    sandbox.wrap,
                    libraries=OWN_LIBRARIES,
                    begin=(worker, environment) if worker else None,
                )
            )
            return Side(name, tree, environment, launcher=launcher, sandbox=sandbox)

        sides = side(first.name, "base", trees[0]), side(second.name, "head", trees[1])
        # Servers import the dependencies meanwhile, and then base's program.
        for checkout in trees:
            add_bytecode(checkout)
        judge = stack.enter_context(judging_device(options.get("device", "cuda"), exchanged))
        if kind == "none":
            judge = replace(judge, files=UnchangedFiles(trees))
        steady = replace(sides[0], name=second.name)
        experiment = partial(
            _JudgedExperiment, **options, starts_ahead=False, repository=repository
        )
        pair = partial(judged_pair, judge=judge, believes_binary=runs_code_of_base, same=same)
        judging = experiment(*sides, pair=pair, controls_base=not is_cpu)
        probes = [(case, case) for case in cases if is_probe(case.kernel)]
        kernels = [(case, case) for case in cases if not is_probe(case.kernel)]
        equal = [pair for pair in kernels if pair[0] in same]
        settled = {result.case: result for result in compare_briefly([(judging, equal)])}
        yield from settled.values()
        kernels = [pair for pair in kernels if pair[0] not in settled]
        yield from compare_cases([(judging, kernels), (experiment(sides[0], steady), probes)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _JudgedExperiment(ABExperiment):
    """Both sides run base's program. repository: with its commits."""

    repository: Path

    def identities(self, base: WorkerProcess, head: WorkerProcess) -> tuple[Identity, Identity]:
        """Raises MissingResultsError unless base's program starts, judges and runs head's code."""
        try:
            first, second = ABExperiment.identities(self, base, head)
        except BrokenRevisionError as error:
            raise MissingResultsError(
                f"{self.head.short_name}'s kernels do not run in base's program ({error}): if it "
                "changes what both share, have it reviewed and measure each by its own "
                "(--trust-head)"
            ) from error
        if first.get("judged") != JUDGED_VERSION:
            raise MissingResultsError(
                f"{self.base.short_name} judges its head by other rules than this program: "
                f"{_oldest(self.repository)}, or measure each by its own program (--trust-head)"
            )
        return first, second


def _oldest(repository: Path) -> str:
    """Name the oldest commit that judges as this program does, if the repository has one."""
    of_this_version = rf"^JUDGED_VERSION = {JUDGED_VERSION}$"
    file = "flexq_bench/measure/worker_messages.py"
    found = git_output(
        repository, "log", "--all", "-G", of_this_version, "--format=%H", "--", file
    ).split()
    return f"the oldest base is {found[-1][:10]}" if found else "take a later base"
