"""Places where the foreign code of a project's gate runs, opened before anything else.

Imports of a server take seconds, and so do those of this process: torch is not imported here, so
that they happen at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from flexq_bench.measure.clean_environment import clean_environment
from flexq_bench.measure.launcher import ForkServer, Launcher, forking_launcher
from flexq_bench.measure.own_secrets import hidden_secrets
from flexq_bench.measure.program import WORKER, program_root
from flexq_bench.measure.sandbox import Kind, Sandbox, building, required_kind
from flexq_bench.measure.shared_tensors import Exchange, exchanges
from flexq_bench.repository.project import Project, ProjectRevision
from flexq_bench.repository.project_builds import BuiltTree, built_tree, folder_of_builds

SLOTS = ("base", "head")


@dataclass(frozen=True, slots=True)
class JudgedPlace:
    """A side's environment without the project's variables, its sandbox, server and exchange."""

    variables: Mapping[str, str]
    sandbox: Sandbox
    launcher: Launcher
    exchange: Exchange


@contextmanager
def judged_places(
    variables: Mapping[str, str], kind: Kind | None = None
) -> Iterator[dict[str, JudgedPlace]]:
    """The places of base and head, whose servers start.

    variables: of base's project file. kind: of the sandboxes; None: the one that this machine has.
    Raises SandboxError if there is none.
    """
    kind = required_kind() if kind is None else kind
    with ExitStack() as stack:
        stack.enter_context(hidden_secrets())
        places = {}
        for slot, exchange in stack.enter_context(exchanges(*SLOTS)).items():
            own = stack.enter_context(clean_environment())
            environment = {**own, **variables}
            read = [folder_of_builds(own), program_root(), exchange.inputs]
            sandbox = Sandbox(environment, kind, read, [exchange.outputs])
            launcher = stack.enter_context(
                forking_launcher(program_root(), sandbox.wrap, begin=(WORKER, environment))
            )
            places[slot] = JudgedPlace(own, sandbox, launcher, exchange)
        yield places
        for place in places.values():  # before either is waited for
            if isinstance(place.launcher, ForkServer):
                place.launcher.finish()


def trees_built_in(
    places: Mapping[str, JudgedPlace], project: Project, revisions: Sequence[ProjectRevision]
) -> list[BuiltTree]:
    """Build each side's commit in a sandbox like that of its place.

    project: with base's file, which says how both are built, even if head moved its folder. Builds
    have no network unless base's file allows it. Raises BuildError if a commit does not build.
    """
    return [
        built_tree(
            project.moved_to(revision.checkout),
            revision.checkout,
            variables=place.variables,
            isolated=partial(building, place.variables, place.sandbox.kind),
        )
        for revision, place in zip(revisions, places.values(), strict=True)
    ]
