"""`flexq-bench gate accuracy`: parse options, call the gate, write its reports."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from flexq_bench.cli.accuracy import progress
from flexq_bench.cli.model_options import (
    BatchOption,
    CalibrationOption,
    CheckpointOption,
    DataOption,
    DtypeOption,
    LengthOption,
    ModelOption,
    SchemesFromOption,
    SegmentsOption,
    TaskDataOption,
    ThroughOption,
    use_own_schemes,
)
from flexq_bench.cli.options import (
    DbOption,
    DeviceOption,
    JsonReportOption,
    JunitOption,
    MarkdownOption,
    PolicyOption,
    SeedOption,
)
from flexq_bench.cli.output import console, print_wrapped, say
from flexq_bench.cli.progress import progress as shown_progress
from flexq_bench.cli.report_files import check_files, write_reports
from flexq_bench.errors import UsageError
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.runs.result_files import STDOUT
from flexq_bench.sweeps.text import split_names


def accuracy(
    model: ModelOption,
    policy: PolicyOption = "default",
    checkpoint: CheckpointOption = None,
    through: ThroughOption = None,
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
            show_default=False,
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
    schemes_from: SchemesFromOption = None,
    data: DataOption = None,
    task_data: TaskDataOption = None,
    calibration: CalibrationOption = None,
    calibration_segments: SegmentsOption = 128,
    calibration_length: LengthOption = None,
    batch: BatchOption = 8,
    dtype: DtypeOption = None,
    diagnosis: Annotated[
        bool,
        typer.Option(
            "--diagnosis/--no-diagnosis",
            help="Locate the loss of failing schemes, by evaluating a part of the text once per "
            "layer.",
        ),
    ] = True,
    markdown: MarkdownOption = None,
    junit: JunitOption = None,
    as_json: JsonReportOption = None,
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
    from flexq_bench.accuracy.plan import CalibrationPlan
    from flexq_bench.accuracy.results import FULL_PRECISION, ORIGINAL, as_through
    from flexq_bench.accuracy.setup import prepare, subjects
    from flexq_bench.accuracy.texts import read_text
    from flexq_bench.checkpoints.folders import is_checkpoint
    from flexq_bench.ci.accuracy_gate.gate import (
        gate_accuracy,
        gate_records,
        planned_evaluation,
    )
    from flexq_bench.ci.accuracy_gate.policy import load_accuracy_policy
    from flexq_bench.ci.notifications import events
    from flexq_bench.ci.reports import accuracy as reports
    from flexq_bench.db.engine import open_database
    from flexq_bench.db.store import add_records

    use_own_schemes(schemes_from)
    files = {"--markdown": markdown, "--junit": junit, "--json": as_json}
    check_files(files)
    rules = load_accuracy_policy(policy)
    if reference is None and is_checkpoint(model):
        raise UsageError(
            f"--model {model} is a quantized checkpoint: give it with --checkpoint, and the model "
            "that it was made from with --model; or that with --reference"
        )
    if reference is not None and base is not None:
        raise UsageError("--reference and --base are two things to compare with: leave one out")
    default = rules.schemes if reference is None else ()
    evaluated = subjects(model, split_names(schemes) or (), checkpoint, default=default)
    as_it_is = (FULL_PRECISION,) if reference is not None and evaluated.original else ()
    judged = tuple(dict.fromkeys((*as_it_is, *evaluated.schemes)))
    compared = ORIGINAL if reference is not None else base or rules.base
    plan, absent = planned_evaluation(
        rules,
        judged,
        compared,
        [read_text(spec) for spec in data or ()],
        None if task_data is None else Path(task_data),
        batch=batch,
        calibration=None
        if calibration is None
        else CalibrationPlan(read_text(calibration), calibration_segments, calibration_length),
        seed=seed,
        through=as_through(through),
        checkpoint=evaluated.checkpoint,
        original=evaluated.original,
        reference=reference,
    )
    out = console(stderr=as_json == STDOUT)
    with open_database(db) as database:
        setup = prepare(
            model,
            plan,
            device=device,
            dtype=dtype,
            trigger="gate",
            each_by_itself=True,
            loading=shown_progress(f"loading {model}"),
        )
        with ended_by_terminate(), progress(setup) as on_unit:
            report = gate_accuracy(
                *(rules, setup, database, judged, compared, absent),
                on_unit=on_unit,
                diagnose=diagnosis,
            )
        decided = gate_records(report, rules, setup.origin, at=datetime.now(UTC))
        with database.session() as session:
            add_records(session, decided)
            events.add_accuracy_gate_events(session, decided)
    writers = {
        "--markdown": reports.markdown,
        "--junit": reports.junit,
        "--json": reports.as_json,
    }
    write_reports(report, files, writers)
    print_wrapped(out, reports.terminal(report))
    for line in reports.notes(report):
        say(out, line)
    say(out, reports.headline(report))
    raise typer.Exit(int(report.exit_code))
