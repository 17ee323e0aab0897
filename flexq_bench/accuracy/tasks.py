"""Tasks of lm-eval on a model in memory: zero-shot questions, or anything else that it knows.

lm-eval (EleutherAI's evaluation harness) is what the papers' zero-shot tables come from, so it
does this here too: its prompts, its normalization, its metrics.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexq_bench.accuracy.errors import AccuracyError, MissingTaskError
from flexq_bench.accuracy.loading import LoadedModel
from flexq_bench.accuracy.local_tasks import LOCAL_TASKS, local_task_file
from flexq_bench.errors import FlexqError

ZERO_SHOT = tuple(LOCAL_TASKS)
_NEAREST = 5
_FILTER_NONE = "none"  # lm-eval's word for answers taken as they are


@dataclass(frozen=True, slots=True)
class TaskMetric:
    """One metric of one task.

    metric: lm-eval's name, with its filter where it has one, for example `acc_norm`.
    items: the metric of each question in the data's order; empty: it has none by question.
    """

    metric: str
    value: float
    higher_is_better: bool
    items: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Result of lm-eval. data_hash: over every question as it was put to the model."""

    task: str
    version: str
    data_hash: str
    n_items: int
    metrics: tuple[TaskMetric, ...]


def check_tasks(names: Sequence[str], data: Path | None) -> None:
    """See that tasks can be evaluated, before a model is loaded.

    Raises MissingTaskError where lm-eval or a task's data are missing, AccuracyError for a task
    that there isn't.
    """
    if data is not None and not data.is_dir():
        raise AccuracyError(f"no folder {str(data)!r}: give the one with the tasks' data")
    if not names:
        return
    _require_lm_eval()
    with tempfile.TemporaryDirectory() as scratch:
        known: Sequence[str] | None = None
        for name in names:
            if _is_file(name):
                if not Path(name).is_file():
                    raise AccuracyError(f"no task file {name}: give a task's name or its .yaml")
            elif name in LOCAL_TASKS and data is not None:
                local_task_file(name, data, Path(scratch))
            elif name not in LOCAL_TASKS:
                known = known or _all_tasks()
                if name not in known:
                    near = difflib.get_close_matches(name, known, n=_NEAREST, cutoff=0.3)
                    raise AccuracyError(
                        f"no task {name!r} in lm-eval: near are {', '.join(near) or 'none'}; or "
                        "give a task's .yaml file"
                    )


def task_name(task: str) -> str:
    """Name of a task in results: a file's task has the file's name."""
    return Path(task).stem if _is_file(task) else task


def run_task(
    model: LoadedModel,
    name: str,
    *,
    data: Path | None = None,
    limit: int | None = None,
    batch: int = 8,
    seed: int = 0,
) -> TaskResult:
    """Evaluate one task on a model.

    name: as lm-eval knows it, or a .yaml file of its form. data: a folder with the data of
    LOCAL_TASKS; None: lm-eval fetches it. limit: only so many questions, the first ones. Raises
    AccuracyError as check_tasks, and MissingTaskError if lm-eval can't evaluate it here.
    """
    check_tasks([name], data)
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder, _quiet():
        spec = name
        if name in LOCAL_TASKS and data is not None:
            spec = str(local_task_file(name, data, Path(folder)))
        manager = TaskManager(include_defaults=not _is_file(spec))
        try:
            evaluation = simple_evaluate(
                model=HFLM(pretrained=model.model, tokenizer=model.tokenizer, batch_size=batch),
                tasks=[spec],
                task_manager=manager,
                limit=limit,
                bootstrap_iters=0,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
        except (RuntimeError, FlexqError):
            raise  # of the model; whoever evaluates several knows what to do
        except Exception as error:  # of lm-eval, its data sets, their templates
            raise MissingTaskError(
                f"lm-eval can't evaluate {name}: {_first_line(error)}; offline, give its data with "
                "--task-data or a task file that names local files"
            ) from error
    if evaluation is None or len(evaluation["samples"]) != 1:
        raise AccuracyError(f"{name} is not one task but a group: name its tasks one by one")
    return _result(evaluation, task_name(name))


def _result(evaluation: Mapping[str, Any], name: str) -> TaskResult:
    ((task, samples),) = evaluation["samples"].items()
    values = evaluation["results"][task]
    better = evaluation["higher_is_better"][task]
    metrics = []
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        answered = [s for s in samples if s.get("filter", _FILTER_NONE) == filtered]
        shown = metric if filtered == _FILTER_NONE else f"{metric},{filtered}"
        metrics.append(
            TaskMetric(
                shown, float(value), bool(better.get(metric, True)), _items(answered, metric)
            )
        )
    questions = {sample["doc_id"]: sample for sample in samples}
    digest = hashlib.sha256()
    for number in sorted(questions):
        sample = questions[number]
        for part in ("doc_hash", "prompt_hash", "target_hash"):
            digest.update(f"{sample[part]}\n".encode())
    version = str(evaluation["versions"].get(task, ""))
    return TaskResult(name, version, digest.hexdigest(), len(questions), tuple(metrics))


def _items(samples: Sequence[Mapping[str, Any]], metric: str) -> tuple[float, ...]:
    ordered = sorted(samples, key=lambda sample: int(sample["doc_id"]))
    values = [sample.get(metric) for sample in ordered]
    if not all(isinstance(value, int | float) for value in values):
        return ()  # for example word perplexity: numbers that only make sense together
    return tuple(float(value) for value in values if value is not None)


def _require_lm_eval() -> None:
    try:
        import lm_eval.models.huggingface  # noqa: F401 (it also needs accelerate)
    except ImportError as error:
        raise MissingTaskError(
            f"tasks need {error.name}, which is not installed: pip install 'flexq-bench[accuracy]'"
        ) from error


def _all_tasks() -> Sequence[str]:
    from lm_eval.tasks import TaskManager

    with _quiet():
        return list(TaskManager().all_tasks)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _first_line(error: BaseException) -> str:
    """Message of the error that began it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Without lm-eval's log and bars: what goes wrong comes as an exception."""
    nowhere = io.StringIO()
    names = ("lm_eval", "datasets", "accelerate")
    levels = [logging.getLogger(name).level for name in names]
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with redirect_stderr(nowhere):
            yield
    finally:
        for name, level in zip(names, levels, strict=True):
            logging.getLogger(name).setLevel(level)
