"""The papers' zero-shot tasks with their data in a local folder, as task files of lm-eval.

Prompts, answers and metrics stay lm-eval's own; only where the data comes from is changed. What
`DIR` of `--task-data DIR` holds, as `save_to_disk` of `datasets` writes it:

| task | in DIR |
| --- | --- |
| piqa | piqa/validation |
| arc_easy, arc_challenge | ARC-Easy/test, ARC-Challenge/test |
| boolq | boolq/validation |
| winogrande | winogrande_xl/validation |
| hellaswag | hellaswag/validation, or hellaswag_val_full.txt.bz2: six lines an item |
"""

from __future__ import annotations

import bz2
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexq_bench.accuracy.errors import AccuracyError, MissingTaskError

_HELLASWAG_LINES = 6  # context, label, four endings
_HELLASWAG_LABELS = ("0", "1", "2", "3")
_HELLASWAG_TEXT = "hellaswag_val_full.txt.bz2"


@dataclass(frozen=True, slots=True)
class _LocalTask:
    """Path of the task's file in lm-eval, and of its data in a folder."""

    file: str
    folder: str
    split: str


LOCAL_TASKS = {
    "piqa": _LocalTask("piqa/piqa.yaml", "piqa/validation", "validation"),
    "arc_easy": _LocalTask("arc/arc_easy.yaml", "ARC-Easy/test", "test"),
    "arc_challenge": _LocalTask("arc/arc_challenge.yaml", "ARC-Challenge/test", "test"),
    "boolq": _LocalTask("super_glue/boolq/default.yaml", "boolq/validation", "validation"),
    "winogrande": _LocalTask("winogrande/default.yaml", "winogrande_xl/validation", "validation"),
    "hellaswag": _LocalTask("hellaswag/hellaswag.yaml", "hellaswag/validation", "validation"),
}


def local_task_file(task: str, data: Path, scratch: Path) -> Path:
    """A task file in `scratch` that reads a task's data from the folder `data`.

    task: one of LOCAL_TASKS. Raises MissingTaskError if the folder has no data for it,
    AccuracyError if they are damaged.
    """
    import lm_eval.tasks

    local = LOCAL_TASKS[task]
    config: dict[str, Any] = {
        "include": str(Path(lm_eval.tasks.__file__).parent / local.file),
        "task": task,
        "dataset_name": None,
        "training_split": None,
        "validation_split": None,
        "test_split": None,
        "fewshot_split": local.split,
        f"{local.split}_split": local.split,
    }
    source = data / local.folder
    text = data / _HELLASWAG_TEXT
    cache = {"cache_dir": str(scratch / "datasets")}
    if source.is_dir():
        files = sorted(map(str, source.glob("*.arrow")))
        if not files:
            raise AccuracyError(f"{source} has no .arrow file: write it with save_to_disk")
        config |= _data("arrow", local.split, files, cache)
    elif task == "hellaswag" and text.is_file():
        items = scratch / "hellaswag.jsonl"
        items.write_text("".join(json.dumps(item) + "\n" for item in _items(text)))
        config |= _data("json", local.split, [str(items)], cache)
        config["process_docs"] = None  # the text holds what lm-eval would make of the raw items
    else:
        raise MissingTaskError(f"no data for {task}: {data} has no {local.folder}")
    file = scratch / f"{task}.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    return file


def _data(builder: str, split: str, files: list[str], cache: dict[str, str]) -> dict[str, Any]:
    return {
        "dataset_path": builder,
        "dataset_kwargs": {"data_files": {split: files}, **cache},
    }


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
