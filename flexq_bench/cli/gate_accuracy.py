"""`flexq-bench gate accuracy`: parse options, call the gate, write its reports."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from flexq_bench.cli.accuracy import progress
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
from flexq_bench.db.store import add_records
from flexq_bench.errors import UsageError
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.packages import require_extra
from flexq_bench.runs.result_files import STDOUT
from flexq_bench.sweeps.text import split_names


@takes_option_groups
def accuracy(
    *,
    evaluated: EvaluatedModelOptions,
    policy: PolicyOption = "default",
    schemes: Annotated[
        str | None,
        typer.Option(
            "--scheme",
            metavar="NAMES",
            help="Comma-separated. Default: the policy's, or none with a checkpoint or a "
            "reference.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="MODEL|STORED",
            help="Judge --model itself, compared with another model (the FP16 original, or a "
            "checkpoint) or a file of accuracy --save-reference. Default: compare with "
            "--model.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="SCHEME",
            help="Scheme to compare with. Default: the policy's, or fp16.",
        ),
    ] = None,
    calibrating: CalibrationOptions,
    diagnosis: Annotated[
        bool,
        typer.Option(
            "--diagnosis/--no-diagnosis",
            help="Locate the loss of failing schemes, by evaluating a part of the text once per "
            "layer.",
        ),
    ] = True,
    output: JunitReportOptions,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    db: DbOption = None,
) -> None:
    """Evaluate a model as it is and quantized, and check its accuracy loss against a policy.

    With --checkpoint exactly the bytes of that folder are judged; reports contain its content hash.
    With --reference --model itself is judged, against that other model.

    Exit code 0: within the limits; 1: the loss is too large, or kernels compute something else; 3:
    it can't be decided; 4: planned results are missing, or the data are too few. Results are
    stored.
    """
    require_extra("accuracy", "gate accuracy", modules_of="models")

    from flexq_bench.accuracy.results import FULL_PRECISION, ORIGINAL
    from flexq_bench.accuracy.setup import prepare, subjects
    from flexq_bench.checkpoints.folders import is_checkpoint
    from flexq_bench.ci.accuracy_gate.gate import (
        gate_accuracy,
        gate_records,
        judged_folders,
        planned_evaluation,
    )
    from flexq_bench.ci.accuracy_gate.policy import load_accuracy_policy
    from flexq_bench.ci.notifications import events
    from flexq_bench.ci.reports import accuracy as reports

    use_own_schemes(evaluated.schemes_from)
    output.check()
    rules = load_accuracy_policy(policy)
    model, checkpoint = evaluated.model, evaluated.checkpoint
    if reference is None and is_checkpoint(model):
        raise UsageError(
            f"--model {model} is a quantized checkpoint: give it with --checkpoint, and the model "
            "that it was made from with --model; or that with --reference"
        )
    if reference is not None and base is not None:
        raise UsageError("--reference and --base are two things to compare with: leave one out")
    default = rules.schemes if reference is None else ()
    subject = subjects(model, split_names(schemes) or (), checkpoint, default=default)
    as_it_is = (FULL_PRECISION,) if reference is not None and subject.original else ()
    judged = tuple(dict.fromkeys((*as_it_is, *subject.schemes)))
    compared = ORIGINAL if reference is not None else base or rules.base
    plan, absent = planned_evaluation(
        rules,
        judged,
        compared,
        evaluated.texts(),
        evaluated.task_folder,
        batch=evaluated.batch,
        calibration=calibrating.plan(),
        seed=seed,
        through=evaluated.implementation(),
        checkpoint=subject.checkpoint,
        original=subject.original,
        reference=reference,
    )
    with open_database(db) as database:
        setup = prepare(
            model,
            plan,
            device=device,
            dtype=evaluated.dtype,
            trigger="gate",
            each_by_itself=True,
            loading=shown_progress(f"loading {model}"),
        )
        with ended_by_terminate(), progress(setup) as on_unit:
            report = gate_accuracy(
                *(rules, setup, database, judged, compared, absent),
                on_unit=on_unit,
                diagnose=diagnosis,
                folders=judged_folders(model, subject.checkpoint, reference),
            )
        decided = gate_records(report, rules, setup.origin, at=datetime.now(UTC))
        with database.session() as session:
            add_records(session, decided)
            events.add_accuracy_gate_events(session, decided)
    output.write(report, markdown=reports.markdown, junit=reports.junit, json=reports.as_json)
    out = console(stderr=output.as_json == STDOUT)
    print_wrapped(out, reports.terminal(report))
    for line in reports.notes(report):
        say(out, line)
    say(out, reports.headline(report))
    raise typer.Exit(int(report.exit_code))
