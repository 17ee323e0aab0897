"""`flexq-bench gate served`: parse options, call the gate, write its reports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from flexq_bench.cli.gate_accuracy import show_report
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import DbOption, SeedOption
from flexq_bench.cli.progress import progress
from flexq_bench.cli.reports import JunitReportOptions, PolicyOption
from flexq_bench.db.engine import open_database
from flexq_bench.errors import UsageError
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.packages import require_extra

if TYPE_CHECKING:
    from flexq_bench.ci.gate_served import ServedPolicy
    from flexq_bench.db.records import CommitInfo
    from flexq_bench.repository.project import Project
    from flexq_bench.served.engines import EngineSpec

_KEY = "OPENAI_API_KEY"


@dataclass(frozen=True)
class QuestionOptions:
    """Questions and the reference, in place of the policy's."""

    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|TASK",
            help="JSON lines of prompt and answer, or a task of lm-eval (name or .yaml), in place "
            "of the policy's suites. Repeatable.",
        ),
    ] = None
    checker: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of lines of --suite that name none: exact, number, choice, regex, code.",
        ),
    ] = None
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT",
            help="Judge the KL divergence from our own evaluation of it, in place of base's.",
        ),
    ] = None

    def of_policy(self, policy: str) -> ServedPolicy:
        """Load a policy with these in place of its own."""
        from flexq_bench.ci.gate_served import load_served_policy

        rules = load_served_policy(policy).with_suites(self.suite or (), self.checker)
        return rules.with_reference(self.reference)


@dataclass(frozen=True)
class EngineOptions:
    """Places and names of both engines."""

    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model to ask for. Default: the first of /v1/models."),
    ] = None
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="0: engines take turns on that GPU; 0,1: both run. Default: they take turns.",
        ),
    ] = None
    project: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="BASE and HEAD are revisions of this project, whose [serve] starts its engine.",
        ),
    ] = None
    alert: Annotated[
        bool,
        typer.Option("--alert", help="With --project: open alerts for slower commits."),
    ] = False
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65534,
            metavar="N",
            help="Of base, if started here; head has the next. Default: free.",
        ),
    ] = None
    ready: Annotated[
        float,
        typer.Option(
            "--ready-within", min=0.1, metavar="S", help="Time for an engine to get ready."
        ),
    ] = 900.0
    base_label: Annotated[
        str, typer.Option(metavar="NAME", help="Name of base in results. Default: as given.")
    ] = ""
    head_label: Annotated[
        str, typer.Option(metavar="NAME", help="Name of head in results. Default: as given.")
    ] = ""


@takes_option_groups
def served(
    *,
    base: Annotated[
        str,
        typer.Option(
            metavar="CMD|URL",
            help="Engine to compare with: http://HOST:PORT, or a command with {port} (and {gpu}) "
            "such as 'vllm serve M --port {port}'; VAR=VALUE before it sets its environment.",
        ),
    ],
    head: Annotated[str, typer.Option(metavar="CMD|URL", help="Engine to judge.")],
    policy: PolicyOption = "default",
    questions: QuestionOptions,
    engines: EngineOptions,
    output: JunitReportOptions,
    seed: SeedOption = 0,
    db: DbOption = None,
) -> None:
    """Ask two engines the same questions, and judge head by a policy with stated power.

    An API key is read from $OPENAI_API_KEY. Exit code 0: no loss that the policy would detect; 1: a
    loss, or more faulty answers; 3: it can't be decided; 4: an engine did not start or answer, or
    a check was not judged that the policy does not allow. Results are stored.
    """
    require_extra("served", "gate served")

    from flexq_bench.ci.gate_served import ServedRequest, run_served_gate
    from flexq_bench.served.turns import Places, gpus_of

    output.check()
    if engines.alert and engines.project is None:
        raise UsageError("--alert goes with --project: only commits have alerts")
    both, commits, project = _engines(base, head, engines.project, engines.port)
    if project is not None and project.file.serve is not None and policy == "default":
        policy = str(project.root / project.inside / project.file.serve.policy)
    rules = questions.of_policy(policy)
    shas = {side: commit.sha[:10] for side, commit in commits.items()}
    request = ServedRequest(
        *both,
        Places(gpus_of(engines.gpus), engines.model, engines.ready),
        labels=(
            engines.base_label or shas.get("base", ""),
            engines.head_label or shas.get("head", ""),
        ),
        seed=seed,
        key=os.environ.get(_KEY) or None,
        project="" if project is None else project.name,
        commits=commits,
        alerting=engines.alert,
    )
    with open_database(db) as database, ended_by_terminate():
        report = run_served_gate(rules, request, database, progress=_progress)
    show_report(report, output)


def _engines(
    base: str, head: str, project: str | None, port: int | None
) -> tuple[tuple[EngineSpec, EngineSpec], dict[str, CommitInfo], Project | None]:
    """Return both engines; of a project also their commits."""
    from flexq_bench.served.engines import engine

    ports = (port, None if port is None else port + 1)
    if project is None:
        texts = zip(("base", "head"), (base, head), ports, strict=True)
        mine, other = (engine(side, text, port=own) for side, text, own in texts)
        return (mine, other), {}, None
    from flexq_bench.repository.project import open_project, revision
    from flexq_bench.served.speed.commits import engine_of_commit

    opened = open_project(project)
    revisions = {side: revision(opened, text) for side, text in (("base", base), ("head", head))}
    mine, other = (
        replace(engine_of_commit(opened, commit.checkout, side), port=own)
        for (side, commit), own in zip(revisions.items(), ports, strict=True)
    )
    return (mine, other), {side: read.commit for side, read in revisions.items()}, opened


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    with progress("asking", total) as bar:
        yield bar.advance
