"""`flexq-bench gate accuracy`: parse, call the gate, write its reports."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from flexq_bench.cli.accuracy import progress
from flexq_bench.cli.model_options import (
    BatchOption,
    CalibrationOption,
    DataOption,
    DtypeOption,
    LengthOption,
    ModelOption,
    SegmentsOption,
    TaskDataOption,
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
from flexq_bench.cli.output import console, say, show_by_words
from flexq_bench.cli.report_files import STDOUT, check_folders, write_reports
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.runs.sweep_text import split_names


def accuracy(
    model: ModelOption,
    policy: PolicyOption = "default",
    schemes: Annotated[
        str | None,
        typer.Option("--scheme", metavar="NAMES", help="Comma-separated; default: the policy's."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="SCHEME", help="What to compare with; default: the policy's, or fp16."
        ),
    ] = None,
    data: DataOption = None,
    task_data: TaskDataOption = None,
    calibration: CalibrationOption = None,
    calibration_segments: SegmentsOption = 128,
    calibration_length: LengthOption = None,
    batch: BatchOption = 8,
    dtype: DtypeOption = None,
    markdown: MarkdownOption = None,
    junit: JunitOption = None,
    as_json: JsonReportOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    db: DbOption = None,
) -> None:
    """Evaluate a model as it is and quantized, and hold what it loses against a policy.

    Exit code 0: within the limits; 1: it lost too much, or kernels compute something else; 3: it
    can't be told; 4: planned results are missing. Results are stored.
    """
    from ci.accuracy_policy import load_accuracy_policy
    from ci.gate_accuracy import gate_accuracy, planned_evaluation
    from ci.gate_accuracy_records import gate_records
    from ci.reports import accuracy as reports
    from db.engine import open_database
    from db.gate_store import add_gates
    from flexq_bench.accuracy import CalibrationPlan, read_text
    from flexq_bench.accuracy.setup import prepare

    files = {"--markdown": markdown, "--junit": junit, "--json": as_json}
    check_folders(files)
    rules = load_accuracy_policy(policy)
    judged = split_names(schemes) or rules.schemes
    compared = base or rules.base
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
    )
    out = console(stderr=as_json == STDOUT)
    with open_database(db) as database:
        setup = prepare(model, plan, device=device, dtype=dtype, trigger="gate")
        with ended_by_terminate(), progress(setup) as on_unit:
            report = gate_accuracy(
                rules, setup, database, judged, compared, absent, on_unit=on_unit
            )
        decided = gate_records(report, rules, setup.origin, at=datetime.now(UTC))
        with database.session() as session:
            add_gates(session, decided)
    writers = {
        "--markdown": reports.markdown,
        "--junit": reports.junit,
        "--json": reports.as_json,
    }
    write_reports(report, files, writers)
    show_by_words(out, reports.terminal(report))
    say(out, reports.headline(report))
    raise typer.Exit(int(report.exit_code))
