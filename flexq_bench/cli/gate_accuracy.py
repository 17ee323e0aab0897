"""`flexq-bench gate accuracy`: parse options, call the gate, write its reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from flexq_bench.cli.accuracy import segment_progress
from flexq_bench.cli.model_options import (
    CalibrationOptions,
    EvaluatedModelOptions,
    use_own_schemes,
)
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import DbOption, DeviceOption, SeedOption
from flexq_bench.cli.output import console, print_wrapped, say
from flexq_bench.cli.progress import progress as shown_progress
from flexq_bench.cli.reports import JunitReportOptions, PolicyOption
from flexq_bench.db.engine import open_database
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.packages import require_extra
from flexq_bench.sweeps.text import split_names

if TYPE_CHECKING:
    from flexq_bench.ci.accuracy_gate.gate import AccuracyReport


@dataclass(frozen=True)
class JudgedOptions:
    """Judged schemes or model, and what they are compared with."""

    schemes: Annotated[
        str | None,
        typer.Option(
            "--scheme",
            metavar="NAMES",
            help="Comma-separated. Default: the policy's, or none with a checkpoint or a "
            "reference.",
        ),
    ] = None
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="MODEL|STORED",
            help="Judge --model itself, compared with another model (the FP16 original, or a "
            "checkpoint) or a file of accuracy --save-reference. Default: compare with "
            "--model.",
        ),
    ] = None
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="SCHEME",
            help="Scheme to compare with. Default: the policy's, or fp16.",
        ),
    ] = None
    approved: Annotated[
        Path | None,
        typer.Option(
            "--approved",
            metavar="FILE",
            help="Judge the checkpoint's fidelity by an approved reference.",
        ),
    ] = None
    approve: Annotated[
        Path | None,
        typer.Option(
            "--approve",
            metavar="FILE",
            help="Write the checkpoint's results as an approved reference, whatever the outcome.",
        ),
    ] = None
    approver: Annotated[
        str, typer.Option("--approver", metavar="NAME", help="Who approves it.")
    ] = ""


@dataclass(frozen=True)
class EffortOptions:
    """Extent of the evaluation and of what is printed."""

    diagnosis: Annotated[
        bool,
        typer.Option(
            "--diagnosis/--no-diagnosis",
            help="Locate the loss of failing schemes, by evaluating a part of the text once per "
            "layer.",
        ),
    ] = True
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A first opinion on a few segments, which is not stored: what does not fail on "
            "them is not judged, so the exit code is 1 or 4.",
        ),
    ] = False
    details: Annotated[
        bool,
        typer.Option(
            "--details", help="Show a line for each text of a check, and the details of all checks."
        ),
    ] = False


@takes_option_groups
def accuracy(
    *,
    evaluated: EvaluatedModelOptions,
    policy: PolicyOption = "default",
    judged: JudgedOptions,
    calibrating: CalibrationOptions,
    effort: EffortOptions,
    output: JunitReportOptions,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    db: DbOption = None,
) -> None:
    """Evaluate a model as it is and quantized, and check its accuracy loss against a policy.

    With --checkpoint exactly the bytes of that folder are judged; reports contain its content hash.
    With --reference --model itself is judged, against that other model.

    Exit code 0: within the limits; 1: the loss is too large, kernels compute something else, or
    the model can't be evaluated; 3: it can't be decided; 4: a limit was not judged that the policy
    does not allow. Results are stored.
    """
    require_extra("accuracy", "gate accuracy", modules_of="models")

    from flexq_bench.ci.accuracy_gate.policy import load_accuracy_policy
    from flexq_bench.ci.accuracy_gate.run import GateRequest, run_gate

    use_own_schemes(evaluated.schemes_from)
    output.check()
    request = GateRequest(
        evaluated.model,
        evaluated.texts(),
        schemes=split_names(judged.schemes) or (),
        checkpoint=evaluated.checkpoint,
        reference=judged.reference,
        base=judged.base,
        task_data=evaluated.task_folder,
        batch=evaluated.batch,
        calibration=calibrating.plan(),
        seed=seed,
        through=evaluated.implementation(),
        device=device,
        dtype=evaluated.dtype,
        approved=judged.approved,
        approve=judged.approve,
        approver=judged.approver,
    )
    rules = load_accuracy_policy(policy)
    with open_database(db) as database, ended_by_terminate():
        report = run_gate(
            *(rules, request, database),
            loading=shown_progress(f"loading {evaluated.model}"),
            progress=segment_progress,
            diagnose=effort.diagnosis,
            quick=effort.quick,
        )
    show_report(report, output, every=effort.details)


def show_report(
    report: AccuracyReport, output: JunitReportOptions, *, every: bool = False
) -> NoReturn:
    """Write and print the report of a gate, and exit. every: print all texts and details."""
    from flexq_bench.ci.reports import accuracy as reports

    output.write(report, markdown=reports.markdown, junit=reports.junit, json=reports.as_json)
    out = console(stderr=output.use_stdout)
    say(out, reports.headline(report))
    print_wrapped(out, reports.terminal(report, every=every))
    for line in (*reports.reasons(report, every=every), *reports.notes(report, every=every)):
        say(out, line)
    raise typer.Exit(int(report.exit_code))
