"""`flexq-bench accuracy`: accuracy loss of a model under quantization schemes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexq_bench.cli.model_options import (
    CalibrationOptions,
    EvaluatedModelOptions,
    SegmentOptions,
    model_option,
    use_own_schemes,
)
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import (
    MAX_COUNT,
    ClusterOption,
    DbOption,
    DeviceOption,
    JsonFileOption,
    SeedOption,
)
from flexq_bench.cli.output import console, print_wrapped, say, say_interrupted
from flexq_bench.cli.progress import progress as shown_progress
from flexq_bench.db import queries
from flexq_bench.db.engine import Database, open_database
from flexq_bench.db.queries import Filters
from flexq_bench.db.records import AccuracyRecord, RunInfo
from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.packages import require_extra
from flexq_bench.runs.result_files import ResultFiles
from flexq_bench.sweeps.text import split_names

if TYPE_CHECKING:
    from rich.console import Console

    from flexq_bench.accuracy.plan import EvaluationPlan
    from flexq_bench.accuracy.records import OnUnit, Unit
    from flexq_bench.accuracy.results import MetricResult
    from flexq_bench.accuracy.setup import PreparedModel
    from flexq_bench.kernels.contract import Backend
    from flexq_bench.schemes import Progress as OnBlock

    Evaluate = Callable[[], list[MetricResult]]

_DEFAULT_SCHEMES = ("flexq-w6ax",)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskOptions:
    """Tasks of lm-eval."""

    tasks: Annotated[
        str | None,
        model_option(
            metavar="NAMES",
            help="Tasks of lm-eval, by name or .yaml file; zero-shot: the six tasks of the papers.",
        ),
    ] = None
    limit: Annotated[
        int | None,
        model_option(min=1, max=MAX_COUNT, help="Maximum number of questions of each task."),
    ] = None
    chat_template: Annotated[
        bool,
        model_option(
            "--chat-template",
            help="Format questions as a user's turn by the tokenizer's chat template, for instruct "
            "models.",
        ),
    ] = False
    few_shot: Annotated[
        int | None,
        model_option(
            min=0,
            max=MAX_COUNT,
            help="Examples before each question. Default: the task's own number.",
        ),
    ] = None


@takes_option_groups
def accuracy(
    *,
    evaluated: EvaluatedModelOptions,
    schemes: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated names of list schemes. Default: flexq-w6ax, or none with a "
            "checkpoint.",
        ),
    ] = None,
    segments: SegmentOptions,
    bos: Annotated[
        str | None,
        model_option(
            metavar="WHERE",
            help="Position of the BOS token: segment (before each segment), text (only before the "
            "first one, as GPTQ's code), none. Default: before each segment, if the "
            "tokenizer adds one.",
        ),
    ] = None,
    tasks: TaskOptions,
    calibrating: CalibrationOptions,
    layers: Annotated[
        bool, typer.Option("--layers", help="Also measure the output error of each layer.")
    ] = False,
    save_reference: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the unquantized model's predictions on the texts to a .safetensors file, "
            "for gate accuracy --reference.",
        ),
    ] = None,
    device: DeviceOption = None,
    cluster: ClusterOption = "none",
    seed: SeedOption = 0,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Resume this run: evaluate only its missing results."),
    ] = None,
    db: DbOption = None,
    as_json: JsonFileOption = None,
) -> None:
    """Evaluate a model as it is and under schemes, or a checkpoint; store results, print tables.

    --model may be the folder of a quantized checkpoint: its bytes are evaluated, without the
    original they were made of.

    Exit code 0: evaluated; 2: an argument doesn't exist or doesn't fit; 5: an evaluation failed;
    130: interrupted (continue with --resume).
    """
    require_extra("accuracy", "accuracy", modules_of="models")

    from flexq_bench.accuracy import SUITE
    from flexq_bench.accuracy.bos import as_bos
    from flexq_bench.accuracy.plan import EvaluationPlan
    from flexq_bench.accuracy.setup import named_tasks, prepare, subjects
    from flexq_bench.accuracy.tasks import check_tasks
    from flexq_bench.fleet import NO_CLUSTER
    from flexq_bench.runs.lifecycle import new_run

    use_own_schemes(evaluated.schemes_from)
    files = ResultFiles(as_json)
    model, checkpoint = evaluated.model, evaluated.checkpoint
    subject = subjects(model, split_names(schemes) or (), checkpoint, default=_DEFAULT_SCHEMES)
    plan = EvaluationPlan(
        schemes=subject.schemes,
        checkpoint=subject.checkpoint,
        original=subject.original,
        through=evaluated.implementation(),
        texts=evaluated.texts(),
        tasks=named_tasks(tasks.tasks),
        task_data=evaluated.task_folder,
        context=segments.context,
        max_tokens=segments.max_tokens,
        bos=as_bos(bos),
        limit=tasks.limit,
        batch=evaluated.batch,
        chat_template=tasks.chat_template,
        few_shot=tasks.few_shot,
        layers=layers,
        calibration=calibrating.plan(),
        seed=seed,
    )
    if save_reference is not None:
        _check_reference_file(save_reference, plan, cluster)
    with open_database(db) as database:
        run = new_run(SUITE, "manual", ()) if resume is None else _resumed(database, resume)
        if cluster == NO_CLUSTER:
            setup = prepare(
                model,
                plan,
                device=device,
                dtype=evaluated.dtype,
                trigger="manual",
                run=run,
                loading=shown_progress(f"loading {model}"),
            )
            evaluate = _in_this_process(database, setup)
        else:
            check_tasks(plan.tasks, plan.task_data)
            evaluate = _on_cluster(database, model, plan, run, cluster, device, evaluated.dtype)
        code = _evaluate_and_report(database, run, evaluate, files)
        if save_reference is not None and code == ExitCode.PASS:
            _save_reference(save_reference, setup, files)
        raise typer.Exit(code)


def _check_reference_file(path: Path, plan: EvaluationPlan, cluster: str) -> None:
    """Raise UsageError if a reference can't be saved, before anything is evaluated."""
    from flexq_bench.accuracy.stored_reference import SUFFIX
    from flexq_bench.fleet import NO_CLUSTER

    if cluster != NO_CLUSTER or not plan.texts or not plan.original:
        raise UsageError(
            "--save-reference writes the predictions of an unquantized model on texts, computed "
            "by this process: give --data and the original model, without --cluster"
        )
    if path.suffix != SUFFIX or not path.parent.is_dir():
        raise UsageError(f"--save-reference {path}: give a {SUFFIX} file in a folder that is there")


def _save_reference(path: Path, setup: PreparedModel, files: ResultFiles) -> None:
    digest = setup.evaluator.save_reference(path)
    say(console(stderr=files.uses_stdout), f"reference: {path}, content hash {digest}")


def _resumed(database: Database, prefix: str) -> RunInfo:
    from flexq_bench.accuracy import SUITE

    with database.session() as session:
        run = queries.run_info(session, queries.run_by_uuid_prefix(session, prefix).uuid)
    if run.suite != SUITE:
        raise UsageError(f"run {run.uuid[:8]} is of suite {run.suite}: continue it with `run`")
    return run


def _in_this_process(database: Database, setup: PreparedModel) -> Evaluate:
    from flexq_bench.accuracy.records import execute

    def evaluate() -> list[MetricResult]:
        with progress(setup) as on_unit:
            return execute(
                database, setup.evaluator, setup.plan.units, setup.origin, on_unit=on_unit
            )

    return evaluate


def _on_cluster(
    database: Database,
    model: str,
    plan: EvaluationPlan,
    run: RunInfo,
    address: str,
    device: str | None,
    dtype: str | None,
) -> Evaluate:
    from flexq_bench.accuracy.ray_evaluation import execute_on_cluster

    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device {device} with --cluster: give cpu or cuda, Ray chooses which")
    backend: Backend | None = None if device is None else "cpu" if device == "cpu" else "cuda"

    def evaluate() -> list[MetricResult]:
        with unit_progress(len(plan.units)) as (on_unit, _):
            return execute_on_cluster(
                database,
                model,
                plan,
                run,
                address=address,
                backend=backend,
                dtype=dtype,
                on_unit=on_unit,
            )

    return evaluate


def _evaluate_and_report(
    database: Database, run: RunInfo, evaluate: Evaluate, files: ResultFiles
) -> int:

    out = console(stderr=files.uses_stdout)
    try:
        with ended_by_terminate():
            results = evaluate()
    except KeyboardInterrupt:
        return say_interrupted(f"the same command and --resume {run.uuid[:8]}")
    print_tables(results, out)
    with database.session() as session:
        files.write(queries.stored_records(session, AccuracyRecord, Filters(runs=(run.uuid,))))
    for path in files.paths:
        say(out, f"records: {path}")
    say(out, f"stored {len(results)} results of run {run.uuid[:8]} in {database.url}")
    failed = any(result.value is None for result in results)
    return int(ExitCode.INFRASTRUCTURE if failed else ExitCode.PASS)


def print_tables(findings: Sequence[MetricResult], out: Console) -> None:
    """Print the tables of texts, tasks and layers that have results."""
    from flexq_bench.accuracy import report

    tables = (
        report.texts_table,
        report.positions_table,
        report.agreement_table,
        report.tasks_table,
        report.layers_table,
    )
    for table in (tabulate(findings) for tabulate in tables):
        if table is not None:
            print_wrapped(out, table)


@contextmanager
def progress(setup: PreparedModel) -> Iterator[OnUnit]:
    """Show the progress of a plan that is evaluated in this process."""
    with unit_progress(len(setup.plan.units)) as (on_unit, on_block):
        setup.evaluator.on_block = on_block
        yield on_unit


@contextmanager
def segment_progress(setup: PreparedModel) -> Iterator[tuple[OnUnit, Callable[[str], None]]]:
    """Show evaluated segments of all texts with the time left; yield also a function to show more.

    A text has as many segments as are planned so far; texts that follow are counted as the last.
    """
    from flexq_bench.accuracy.references import ModelReference

    plan = setup.plan
    texts = {text.name for text in plan.texts}
    ahead = {(scheme, text) for scheme in plan.schemes for text in texts}
    counts: dict[Unit, tuple[int, int]] = {}
    with shown_progress("evaluating") as bar:

        def on_segment(scheme: str, text: str, done: int, planned: int) -> None:
            counts[scheme, text] = done, planned
            later = planned * len(ahead - counts.keys())
            finished, total = (sum(column) for column in zip(*counts.values(), strict=True))
            bar.update(finished, total + later, f"segments of {text} under {scheme}")

        def on_unit(unit: Unit, findings: Sequence[MetricResult]) -> None:
            _log_unit(unit, findings)
            ahead.discard(unit)
            if unit in counts:
                done, _ = counts[unit]
                counts[unit] = done, done

        def on_block(block: int, total: int, what: str) -> None:
            log.info("%s of %d", what, total)
            bar.say(f"quantizing: {block} of {total} blocks")

        setup.evaluator.on_block, setup.evaluator.on_segment = on_block, on_segment
        if isinstance(setup.evaluator.reference, ModelReference):
            setup.evaluator.reference.on_segment = partial(on_segment, plan.schemes[0])
        yield on_unit, bar.say


def _log_unit(unit: Unit, findings: Sequence[MetricResult]) -> None:
    for finding in findings:
        log.info("%s on %s: %s %s", *unit, finding.metric, finding.value)


@contextmanager
def unit_progress(total: int) -> Iterator[tuple[OnUnit, OnBlock]]:
    """Show evaluated units, and the blocks of the model that is being quantized."""
    with shown_progress("evaluating", total) as bar:

        def on_unit(unit: Unit, findings: Sequence[MetricResult]) -> None:
            _log_unit(unit, findings)
            bar.advance(" on ".join(unit))

        def on_block(block: int, total: int, what: str) -> None:
            log.info("%s of %d", what, total)
            bar.say(f"{what} of {total}")

        yield on_unit, on_block
