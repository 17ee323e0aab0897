"""lm-evaluation-harness: `results_*.json`, with the `samples_*.jsonl` beside it.

Results (github.com/EleutherAI/lm-evaluation-harness) are by task and `metric,filter`, with standard
errors and `higher_is_better`; `--log_samples` writes the value of each question to a file per task.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import (
    MAX_BYTES,
    BadResult,
    ExternalResult,
    Reading,
    cleaned,
    collect,
    count,
    number,
    read_json,
)
from flexq_bench.runs.text_files import read_text

_WHAT = "a results_*.json of lm-evaluation-harness"
_Z_95 = 1.96
_LOWER = ("perplexity", "bits_per_byte", "brier", "loss", "wer", "ter")
_OF_FILE = re.compile(r"results_(.*)\.json")  # the time, which its samples have, too


def read(path: str) -> Reading:
    """Read each metric of each task, with its direction, and its values by question.

    Raises UsageError if the file is of another format.
    """
    file = read_json(path, _WHAT)
    results = file.get("results")
    if not isinstance(results, dict) or "configs" not in file:
        raise UsageError(f"{path} has no results with configs: name {_WHAT}")
    at = file.get("date")
    created_at = None
    if isinstance(at, int | float) and not isinstance(at, bool) and 0 < at < 1e11:
        created_at = datetime.fromtimestamp(at, UTC).isoformat()
    entries = (
        (task, partial(_results, task, values, file, Path(path)))
        for task, values in {**results, **(file.get("groups") or {})}.items()
    )
    return collect(entries, created_at=created_at)


def _results(
    task: str, values: Mapping[str, Any], file: Mapping[str, Any], path: Path
) -> list[ExternalResult]:
    config = file.get("config") or {}
    named = file.get("model_name") if config.get("model_args") or not config.get("model") else ""
    # Without arguments that name a model, lm-eval draws a name for each run.
    model = named or config.get("model_args") or config.get("model") or ""
    directions = (file.get("higher_is_better") or {}).get(task) or {}
    n_of_task = (file.get("n-samples") or {}).get(task) or {}
    shots = (file.get("n-shot") or {}).get(task)
    questions = _questions(task, path)
    results = []
    for key, value in values.items():
        metric, _, form = key.partition(",")
        if metric in ("alias", "name", "sample_len", "sample_count") or metric.endswith("_stderr"):
            continue
        if not isinstance(value, int | float):  # of a group without an aggregate: " " or N/A
            continue
        real = number(value, key)
        higher = directions.get(metric)
        if higher is None:
            higher = not any(word in metric for word in _LOWER)
        error = values.get(f"{metric}_stderr,{form}")
        low: float | None = None
        high: float | None = None
        asked, per_question = questions.get((metric, form), ("", ()))
        is_share = 0 <= real <= 1 and not any(word in metric for word in _LOWER)
        if isinstance(error, int | float):
            reach, limits = _Z_95 * error, (0, 1) if is_share else (-math.inf, math.inf)
            low, high = max(real - reach, limits[0]), min(real + reach, limits[1])
        parts = (
            f"model={cleaned(model)}",
            f"filter={form}" if form != "none" else "",
            "" if shots is None else f"shots={shots}",
        )
        result = ExternalResult(
            name=task,
            variant=",".join(filter(None, parts)),
            metric=metric,
            unit="fraction" if is_share else "points",
            direction="higher" if higher else "lower",
            median=real,
            low=low,
            high=high,
            samples=per_question,
            n_samples=len(per_question) or count(n_of_task.get("effective") or 0, "n-samples"),
            environment={
                "tool": "lm-eval",
                "tool_version": cleaned(file.get("lm_eval_version", "")),
                "task_version": cleaned((file.get("versions") or {}).get(task, "")),
            },
            extra={"questions": asked, "git_hash": cleaned(file.get("git_hash", ""))},
        )
        results.append(result)
    return results


def _questions(task: str, path: Path) -> dict[tuple[str, str], tuple[str, tuple[float, ...]]]:
    """Return, by metric and filter, the hash of the questions that were asked and their values.

    Values are in the order of the questions' numbers. Empty: the file of samples is missing.
    """
    named = _OF_FILE.fullmatch(path.name)
    file = path.with_name(f"samples_{task}_{named[1]}.jsonl") if named else path
    if named is None or not file.is_file():
        return {}
    rows = dict(_rows(read_text(str(file), "a file of samples", most_bytes=MAX_BYTES)))
    scores = {}
    metrics = {(m, form) for (_, form), row in rows.items() for m in row.get("metrics") or row}
    for metric, form in metrics:
        here = [(doc, row) for (doc, of), row in sorted(rows.items()) if of == form]
        values = [row.get(metric) for _, row in here]
        if here and all(isinstance(v, int | float) for v in values):
            asked = [(doc, row.get("doc_hash") or row.get("doc")) for doc, row in here]
            digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
            scores[metric, form] = (digest, tuple(map(float, values)))  # type: ignore[arg-type]
    return scores


def _rows(text: str) -> Iterator[tuple[tuple[int, str], dict[str, Any]]]:
    for line in filter(str.strip, text.splitlines()):
        try:
            row = json.loads(line)
            yield (int(row["doc_id"]), str(row.get("filter", "none"))), row
        except (ValueError, KeyError, TypeError, RecursionError):
            raise BadResult("its file of samples is damaged: copy it again") from None
