"""conbench: benchmark results as its API takes and gives them: an object, a list, or JSON lines.

A result (github.com/conbench/conbench, the API's `BenchmarkResultCreate`) has `stats` with data and
unit, `tags` with the name of the benchmark and its case, `github` or `commit`, and `machine_info`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexq_bench.exchange.external.result import (
    ExternalResult,
    Reading,
    cleaned,
    collect_each,
    commit_of,
    iso_time,
    kept,
    objects_with,
    of_values,
    read_objects,
    split_parameters,
)

_WHAT = "results of conbench"
_IDS = ("id", "name")  # of tags, that are no parameters


def read(path: str) -> Reading:
    """Read the median of the data of each result; the run's id is the occasion.

    Rates (B/s, i/s) are better if higher. Raises UsageError if the file is of another format.
    """
    values = read_objects(path, _WHAT)
    if len(values) == 1 and isinstance(values[0], dict) and isinstance(values[0].get("data"), list):
        values = values[0]["data"]  # a page of the API
    entries = objects_with(values, ("stats", "tags"), path, _WHAT)
    return collect_each(entries, _result, "result")


def _result(entry: Mapping[str, Any]) -> ExternalResult:
    tags = dict(entry["tags"])
    shape, variant = split_parameters(
        {key: value for key, value in tags.items() if key not in _IDS and value is not None}
    )
    machine = entry.get("machine_info") or entry.get("hardware") or {}
    gpus = machine.get("gpu_product_names")
    gpus = gpus if isinstance(gpus, list) else []
    sha = (entry.get("github") or {}).get("commit") or (entry.get("commit") or {}).get("sha")
    common: dict[str, Any] = {
        "name": str(tags["name"]),
        "variant": variant,
        "shape": shape,
        "device": cleaned((gpus or [machine.get("cpu_model_name") or ""])[0]),
        "environment": {"tool": "conbench", **_texts(entry.get("context") or {})},
        "extra": {
            key: kept(entry[key]) for key in ("info", "run_reason", "run_tags") if entry.get(key)
        },
        "commit": None if sha is None else commit_of(sha),
        "created_at": iso_time(entry.get("timestamp")),
        "occasion": str(entry.get("run_id") or ""),
    }
    stats = entry.get("stats") or {}
    data = [value for value in stats.get("data") or () if value is not None]
    if entry.get("error") or not data:
        reason = cleaned(entry.get("error") or "it has no data")
        return ExternalResult(**common, median=None, detail=reason)
    return ExternalResult(**common, **of_values(data, stats["unit"]))


def _texts(context: Mapping[str, Any]) -> dict[str, str]:
    return {f"context_{key}": cleaned(value) for key, value in list(context.items())[:50]}
