"""Tasks with their data in a local folder, as task files of lm-eval.

Prompts, answers, filters and metrics are lm-eval's; only the source of the data is changed. The
folder `DIR` of `--task-data DIR` contains the questions, and few-shot examples if a task has them:

| task | in DIR |
| --- | --- |
| piqa | piqa/validation |
| arc_easy, arc_challenge | ARC-Easy/test, ARC-Challenge/test |
| boolq | boolq/validation |
| winogrande | winogrande_xl/validation |
| hellaswag | hellaswag/validation, or hellaswag_val_full.txt.bz2: six lines an item |
| gsm8k | gsm8k/test and gsm8k/train (examples) |
| ifeval | ifeval/train (its questions) |
| mmlu | mmlu/SUBJECT/test and mmlu/SUBJECT/dev (examples), for each of 57 subjects |

Each of these is a folder as `save_to_disk` of `datasets` writes it (.arrow files), or with .parquet
files; or a file of that name with the ending .parquet or .jsonl, a row a line, columns as on the
Hugging Face hub.
"""

from __future__ import annotations

import bz2
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexq_bench.accuracy.errors import AccuracyError, MissingTaskError

_HELLASWAG_LINES = 6  # context, label, four endings
_HELLASWAG_LABELS = ("0", "1", "2", "3")
_HELLASWAG_TEXT = "hellaswag_val_full.txt.bz2"
_MMLU, _MMLU_FILES = "mmlu", "mmlu/default"
_MMLU_GROUP = {  # with the weights of subjects in lm-eval's mmlu/default/_mmlu.yaml and its groups
    "group": _MMLU,
    "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    "metadata": {"version": 2},
}
_BUILDERS = {".arrow": "arrow", ".parquet": "parquet", ".jsonl": "json"}


@dataclass(frozen=True, slots=True)
class _LocalTask:
    """Path of a task's file in lm-eval, its data folder, and the split of its questions.

    examples: split of the few-shot examples; empty: that of the questions. role: lm-eval's name for
    the split of the questions.
    """

    file: str
    folder: str
    split: str
    examples: str = ""
    role: str = ""


ZERO_SHOT_TASKS = {
    "piqa": _LocalTask("piqa/piqa.yaml", "piqa", "validation"),
    "arc_easy": _LocalTask("arc/arc_easy.yaml", "ARC-Easy", "test"),
    "arc_challenge": _LocalTask("arc/arc_challenge.yaml", "ARC-Challenge", "test"),
    "boolq": _LocalTask("super_glue/boolq/default.yaml", "boolq", "validation"),
    "winogrande": _LocalTask("winogrande/default.yaml", "winogrande_xl", "validation"),
    "hellaswag": _LocalTask("hellaswag/hellaswag.yaml", "hellaswag", "validation"),
}
_TASKS = ZERO_SHOT_TASKS | {
    "gsm8k": _LocalTask("gsm8k/gsm8k.yaml", "gsm8k", "test", "train"),
    "ifeval": _LocalTask("ifeval/ifeval.yaml", "ifeval", "train", role="test"),
}
LOCAL_TASKS = (*_TASKS, _MMLU)


def where_data_lies(task: str) -> str:
    """Return the folder within `--task-data DIR` of the questions of a task of LOCAL_TASKS."""
    if task == _MMLU:
        return f"{_MMLU}/SUBJECT/test"
    return f"{_TASKS[task].folder}/{_TASKS[task].split}"


def write_local_task(task: str, data: Path, scratch: Path) -> Path:
    """Write task files that read a task's data from the folder `data`; returns their folder.

    task: one of LOCAL_TASKS, also its name in lm-eval. scratch: parent of the new folder. Raises
    MissingTaskError if `data` has no data of the task, AccuracyError if they are damaged.
    """
    folder = scratch / f"{task}-task"
    folder.mkdir(exist_ok=True)
    if task != _MMLU:
        _write(folder, task, _config(task, _TASKS[task], data, scratch))
        return folder
    subjects = mmlu_subjects()
    lacking = [name for name in subjects if not (data / _MMLU / name).is_dir()]
    if lacking:
        raise MissingTaskError(
            f"no data for {len(lacking)} of mmlu's {len(subjects)} subjects: {data} has no "
            f"{_MMLU}/{lacking[0]}"
        )
    for subject in subjects:
        name = f"{_MMLU}_{subject}"
        local = _LocalTask(f"{_MMLU_FILES}/{name}.yaml", f"{_MMLU}/{subject}", "test", "dev")
        _write(folder, name, _config(name, local, data, scratch))
    group = {**_MMLU_GROUP, "task": [f"{_MMLU}_{subject}" for subject in subjects]}
    _write(folder, _MMLU, group)
    return folder


def mmlu_subjects() -> tuple[str, ...]:
    """Return the subjects of MMLU from lm-eval's task files."""
    files = sorted((_lm_eval_tasks() / _MMLU_FILES).glob(f"{_MMLU}_*.yaml"))
    return tuple(file.stem.removeprefix(f"{_MMLU}_") for file in files)


def _lm_eval_tasks() -> Path:
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


def _config(task: str, local: _LocalTask, data: Path, scratch: Path) -> dict[str, Any]:
    examples, role = local.examples or local.split, local.role or local.split
    config: dict[str, Any] = {
        "include": str(_lm_eval_tasks() / local.file),
        "task": task,
        "dataset_name": None,
        "training_split": None,
        "validation_split": None,
        "test_split": None,
        "fewshot_split": examples,
        f"{role}_split": local.split,
    }
    text = data / _HELLASWAG_TEXT
    cache = {"cache_dir": str(scratch / "datasets")}
    files = {split: _files(data / local.folder / split) for split in {examples, local.split}}
    lacking = [split for split, paths in sorted(files.items()) if not paths]
    if lacking and task == "hellaswag" and text.is_file():
        items = scratch / "hellaswag.jsonl"
        items.write_text("".join(json.dumps(item) + "\n" for item in _items(text)))
        config |= _data({local.split: [items]}, cache)
        config["process_docs"] = None  # the text contains processed items
    elif lacking:
        where = data / local.folder / lacking[0]
        if where.is_dir():
            raise AccuracyError(
                f"{where} has neither .arrow nor .parquet files: write it with save_to_disk"
            )
        raise MissingTaskError(f"no data for {task}: {data} has no {local.folder}/{lacking[0]}")
    else:
        config |= _data(files, cache)
    return config


def _files(place: Path) -> list[Path]:
    """Return the files of one split of a task's data, which are of one kind."""
    for ending in _BUILDERS:
        if files := sorted(place.glob(f"*{ending}")) if place.is_dir() else []:
            return files
        file = place.with_name(place.name + ending)
        if file.is_file():
            return [file]
    return []


def _data(parts: Mapping[str, list[Path]], cache: dict[str, str]) -> dict[str, Any]:
    endings = {file.suffix for files in parts.values() for file in files}
    if len(endings) > 1:
        first = next(iter(parts.values()))[0]
        raise AccuracyError(f"{first.parent} and its neighbours mix {', '.join(sorted(endings))}")
    files = {split: [str(file) for file in paths] for split, paths in parts.items()}
    return {
        "dataset_path": _BUILDERS[endings.pop()],
        "dataset_kwargs": {"data_files": files, **cache},
    }


def _write(folder: Path, name: str, config: dict[str, Any]) -> None:
    (folder / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML


def _items(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = bz2.decompress(path.read_bytes()).decode().splitlines()
    except (OSError, ValueError) as error:
        raise AccuracyError(f"can't read {path}: {error}") from error
    if not lines:
        raise AccuracyError(f"{path} is empty: each item has {_HELLASWAG_LINES} lines")
    if len(lines) % _HELLASWAG_LINES:
        raise AccuracyError(f"{path} is cut off: each item has {_HELLASWAG_LINES} lines")
    for start in range(0, len(lines), _HELLASWAG_LINES):
        context, label, *endings = lines[start : start + _HELLASWAG_LINES]
        if label.strip() not in _HELLASWAG_LABELS:
            raise AccuracyError(
                f"{path}, line {start + 2}: {label.strip()!r} is no label of four endings, 0 … 3"
            )
        yield {"query": context, "label": label.strip(), "choices": endings}
