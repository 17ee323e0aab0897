"""Tasks of lm-eval on a model in memory: zero-shot questions, or any other of its tasks.

The papers' zero-shot tables come from lm-eval (EleutherAI's evaluation harness), so its prompts,
normalization and metrics are used here too.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import logging
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexq_bench.accuracy.errors import AccuracyError, MissingTaskError
from flexq_bench.accuracy.loading import LoadedModel
from flexq_bench.accuracy.local_tasks import LOCAL_TASKS, ZERO_SHOT_TASKS, write_local_task
from flexq_bench.errors import FlexqError, library_reason

ZERO_SHOT = tuple(ZERO_SHOT_TASKS)
_MAX_SUGGESTIONS = 5
_IFEVAL = ("ifeval", ("langdetect", "immutabledict"))  # packages of lm-eval's extra
# Top-level lines of a task's YAML; a tag is a word, or a list in either notation.
_TASK = re.compile(r"""^["']?(?:task|group)["']?:[ \t]*["']?([^\s"'#\[{&*]+)""", re.MULTILINE)
_TAGS = re.compile(r"""^["']?tag["']?:[ \t]*(.*)\n((?:[ \t]*-[ \t].*\n?)*)""", re.MULTILINE)
_WORD = re.compile(r"""[^\s,\[\]"'-][^\s,\[\]"']*""")
_FILTER_NONE = "none"  # lm-eval's name for unfiltered answers


@dataclass(frozen=True, slots=True)
class TaskMetric:
    """One metric of one task.

    metric: lm-eval's name, with its filter if it has one, for example `acc_norm`. items: the metric
    of each question in the data's order; empty: not defined by question. parts: of a group, the
    metric of each of its tasks; empty: of a single task.
    """

    metric: str
    value: float
    higher_is_better: bool
    items: tuple[float, ...]
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Result of lm-eval. data_hash: over all questions as prompted."""

    task: str
    version: str
    data_hash: str
    n_items: int
    metrics: tuple[TaskMetric, ...]


def check_tasks(names: Sequence[str], data: Path | None) -> None:
    """Check that tasks can be evaluated, before a model is loaded.

    Raises MissingTaskError if lm-eval or a task's data are missing, AccuracyError for an unknown
    task.
    """
    if data is not None and not data.is_dir():
        raise AccuracyError(f"no folder {str(data)!r}: give the one with the tasks' data")
    if not names:
        return
    folder = _tasks_folder()
    needing, packages = _IFEVAL
    lacking = [package for package in packages if find_spec(package) is None]
    if lacking and needing in names:
        raise MissingTaskError(
            f"{needing} needs {' and '.join(lacking)}: pip install 'lm-eval[{needing}]'"
        )
    with tempfile.TemporaryDirectory() as scratch:
        known: Sequence[str] | None = None
        for name in names:
            if _is_file(name):
                if not Path(name).is_file():
                    raise AccuracyError(f"no task file {name}: give a task's name or its .yaml")
            elif name in LOCAL_TASKS and data is not None:
                write_local_task(name, data, Path(scratch))
            elif name not in ZERO_SHOT:
                known = known or _tasks_below(folder)
                if name not in known:
                    near = difflib.get_close_matches(name, known, n=_MAX_SUGGESTIONS, cutoff=0.3)
                    raise AccuracyError(
                        f"no task {name!r} in lm-eval: near are {', '.join(near) or 'none'}; or "
                        "give a task's .yaml file"
                    )
    _require_lm_eval()


def check_chat_template(model: LoadedModel) -> str:
    """Return the SHA-256 of the tokenizer's chat template. Raises AccuracyError if it has none."""
    template = getattr(model.tokenizer, "chat_template", None)
    if not template:
        raise AccuracyError(
            f"the tokenizer of {model.name} has no chat template: leave --chat-template out"
        )
    return hashlib.sha256(str(template).encode()).hexdigest()


def task_name(task: str) -> str:
    """Return the name of a task in results; for a task file, the name of the file."""
    return Path(task).stem if _is_file(task) else task


def run_task(
    model: LoadedModel,
    name: str,
    *,
    data: Path | None = None,
    limit: int | None = None,
    batch: int = 8,
    chat_template: bool = False,
    few_shot: int | None = None,
    seed: int = 0,
) -> TaskResult:
    """Evaluate one task, or one group of tasks, on a model.

    name: a name known to lm-eval, or a .yaml task file. data: a folder with the data of
    LOCAL_TASKS; None: lm-eval downloads it. limit: number of questions, the first ones; for a
    group, of each task. chat_template: format each question as a user's turn with the tokenizer's
    template, and few-shot examples as turns before it. few_shot: number of examples before each
    question; None: the task's.

    The metric of a group is lm-eval's. Its questions are those of its tasks, in the order of their
    names, if the metric is their mean (as in MMLU, which weights its subjects by size). Raises
    AccuracyError as check_tasks and check_chat_template, and MissingTaskError if lm-eval can't
    evaluate the task here.
    """
    check_tasks([name], data)
    if chat_template:
        check_chat_template(model)
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with _task_manager(name, data) as manager:
        evaluation = simple_evaluate(
            model=HFLM(pretrained=model.model, tokenizer=model.tokenizer, batch_size=batch),
            tasks=[name],
            task_manager=manager,
            num_fewshot=few_shot,
            apply_chat_template=chat_template,
            fewshot_as_multiturn=chat_template,
            limit=limit,
            bootstrap_iters=0,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    if evaluation is None or not evaluation["samples"]:
        raise AccuracyError(f"lm-eval gave no result of {name}")
    if len(evaluation["samples"]) == 1 and not evaluation.get("groups"):
        ((task, _),) = evaluation["samples"].items()
        return _result(evaluation, task, task_name(name))
    return _group_result(evaluation, name)


def load_requests(
    name: str, *, data: Path | None = None, few_shot: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """Return the tasks of a name in lm-eval by their own names, each with its `instances`.

    Arguments and errors are those of run_task: an instance is a request that lm-eval would put to a
    model.
    """
    check_tasks([name], data)
    with _task_manager(name, data) as manager:
        tasks: dict[str, Any] = manager.load([name])["tasks"]
        for task in tasks.values():
            own = task.get_config("num_fewshot")
            if own is None or (few_shot is not None and own != 0):  # as in simple_evaluate
                task.set_config(key="num_fewshot", value=few_shot or 0)
            task.set_fewshot_seed(seed=seed)
            task.build_all_requests()
        return tasks


@contextmanager
def _task_manager(name: str, data: Path | None) -> Iterator[Any]:
    """Yield a TaskManager that knows a task. Raises MissingTaskError for what lm-eval raises."""
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder, _quiet():
        if name in LOCAL_TASKS and data is not None:
            own = write_local_task(name, data, Path(folder))
            manager = TaskManager(include_defaults=False, include_path=str(own))
        else:
            manager = TaskManager(include_defaults=not _is_file(name))
        try:
            yield manager
        except (RuntimeError, FlexqError):
            raise  # of the model; handled by the caller
        except Exception as error:  # of any class: from lm-eval, its data sets, their templates
            raise MissingTaskError(
                f"lm-eval can't evaluate {name}: {library_reason(_root_cause(error))}; offline, "
                "give its data with --task-data or a task file that names local files"
            ) from error


def _group_result(evaluation: Mapping[str, Any], name: str) -> TaskResult:
    values = evaluation.get("groups", {}).get(name)
    if values is None:
        raise AccuracyError(
            f"{name} is not one task but several, without a metric of all: name them one by one"
        )
    tasks = [_result(evaluation, task, task) for task in sorted(evaluation["samples"])]
    metrics = []
    for shown, value in _values(values):
        of_tasks = {r.task: m for r in tasks for m in r.metrics if m.metric == shown}
        items = tuple(item for metric in of_tasks.values() for item in metric.items)
        is_mean = bool(items) and math.isclose(math.fsum(items) / len(items), value, abs_tol=1e-9)
        better = all(metric.higher_is_better for metric in of_tasks.values())
        parts = {task: metric.value for task, metric in of_tasks.items()}
        metrics.append(TaskMetric(shown, value, better, items if is_mean else (), parts))
    digest = hashlib.sha256("".join(f"{r.task} {r.data_hash}\n" for r in tasks).encode())
    version = str(evaluation["versions"].get(name, ""))
    n_items = sum(result.n_items for result in tasks)
    return TaskResult(name, version, digest.hexdigest(), n_items, tuple(metrics))


def _values(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Return the metrics of a task or group, with their filters, without standard errors."""
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if filtered and not metric.endswith("_stderr") and isinstance(value, int | float):
            yield metric if filtered == _FILTER_NONE else key, float(value)


def _result(evaluation: Mapping[str, Any], task: str, name: str) -> TaskResult:
    samples = evaluation["samples"][task]
    values = evaluation["results"][task]
    better = evaluation["higher_is_better"][task]
    metrics = []
    for shown, value in _values(values):
        metric, _, filtered = shown.partition(",")
        wanted = filtered or _FILTER_NONE
        answered = [s for s in samples if s.get("filter", _FILTER_NONE) == wanted]
        items = _items(answered, metric)
        metrics.append(TaskMetric(shown, value, bool(better.get(metric, True)), items))
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
        return ()  # for example word perplexity, which is not defined by question
    return tuple(float(value) for value in values if value is not None)


def _require_lm_eval() -> None:
    try:
        import lm_eval.models.huggingface  # noqa: F401 (it also needs accelerate)
    except ImportError as error:
        raise _not_installed(error.name) from error


def _not_installed(package: str | None) -> MissingTaskError:
    return MissingTaskError(
        f"tasks need {package}, which is not installed: pip install 'flexq-bench[accuracy]'"
    )


def _tasks_folder() -> Path:
    lm_eval = find_spec("lm_eval")
    if lm_eval is None or not lm_eval.submodule_search_locations:
        raise _not_installed("lm_eval")
    return Path(lm_eval.submodule_search_locations[0]) / "tasks"


def _tasks_below(folder: Path) -> Sequence[str]:
    """Return the names of tasks, groups and tags that lm-eval's files define.

    Names are matched by a pattern, because lm-eval's own index parses all 14,000 YAML files, which
    takes 10 times as long.
    """
    names: set[str] = set()
    for path in folder.rglob("*"):
        # Included files have the suffix of YAML, or none.
        if path.suffix not in ("", ".yaml", ".yml") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        names.update(_TASK.findall(text))
        for value, items in _TAGS.findall(text):
            names.update(_WORD.findall(f"{value} {items}"))
    return sorted(names)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence lm-eval's log and progress bars during the block; errors are raised as exceptions."""
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
