"""asv (airspeed velocity): a file of results, or the folder `.asv/results` of all machines.

A file (asv.readthedocs.io, "Benchmark storage") is of one commit, machine and environment: by
benchmark a row whose fields `result_columns` names, with a value for each combination of
parameters. Units are in benchmarks.json in the folder of all machines; without it names tell:
`time_`, `mem_`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import (
    Entries,
    ExternalResult,
    Reading,
    by_unit,
    cleaned,
    collect,
    commit_of,
    kept,
    of_epoch,
    read_json,
    split_parameters,
)

_WHAT = "a file of asv's results, or the folder .asv/results"
_ABOUT = "benchmarks.json"
_NO_RESULTS = (_ABOUT, "machine.json")
_COLUMNS = (
    "result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b",
    "stats_q_25", "stats_q_75", "stats_number", "stats_repeat", "samples", "profile",
)  # fmt: skip
_UNITS = {"time": "seconds", "timeraw": "seconds", "mem": "bytes", "peakmem": "bytes"}  # by prefix


def read(path: str) -> Reading:
    """Read the value of each benchmark and combination of parameters; less is better.

    Failed ones are stored as failed, skipped ones are left out. Raises UsageError if the file is of
    another format, or the folder has no results.
    """
    place = Path(path)
    files = [place]
    if place.is_dir():
        files = [file for file in sorted(place.rglob("*.json")) if file.name not in _NO_RESULTS]
    if not files:
        raise UsageError(f"{path} holds no results: name {_WHAT}")
    return collect(entry for file in files for entry in _of_file(file))


def _of_file(file: Path) -> Entries:
    content = read_json(str(file), _WHAT)
    results, about = content.get("results"), content.get("params")
    if not isinstance(results, dict) or "commit_hash" not in content:
        raise UsageError(f"{file} has no results of a commit: name {_WHAT}")
    machine = about if isinstance(about, dict) else {}
    common = {
        "device": cleaned(machine.get("cpu") or machine.get("machine") or ""),
        "environment": {
            "tool": "asv",
            "env": cleaned(content.get("env_name", "")),
            "python": cleaned(content.get("python", "")),
            "machine": cleaned(machine.get("machine", "")),
        },
    }
    columns = content.get("result_columns") or _COLUMNS
    known = _benchmarks(file)
    for name, values in results.items():
        row = dict(zip(columns, values, strict=False)) if isinstance(values, list) else {}
        if isinstance(values, dict):  # of version 1
            row = values
        if values is not None:
            yield (
                f"{file.name} {name}",
                partial(_results, name, row, known.get(name) or {}, content, common),
            )


def _benchmarks(file: Path) -> Mapping[str, Any]:
    for folder in (file.parent.parent, file.parent):
        if (folder / _ABOUT).is_file():
            return read_json(str(folder / _ABOUT), "the benchmarks.json of asv")
    return {}


def _results(
    name: str,
    row: Mapping[str, Any],
    about: Mapping[str, Any],
    content: Mapping[str, Any],
    common: Mapping[str, Any],
) -> list[ExternalResult]:
    commit = commit_of(content["commit_hash"], committed_at=of_epoch(content.get("date")))
    created_at = of_epoch(row.get("started_at"))
    prefix = name.rpartition(".")[2].partition("_")[0]
    unit = about.get("unit") or _UNITS.get(prefix.lower(), "")
    params = row.get("params") or []
    keys = about.get("param_names") or [f"param{place}" for place in range(len(params))]
    values = row["result"]
    if values is None:
        values = [None]
    results = []
    for place, (combination, value) in enumerate(zip(product(*params), values, strict=False)):
        if isinstance(value, float) and math.isnan(value):
            continue  # skipped
        shape, variant = split_parameters(dict(zip(keys, map(_plain, combination), strict=False)))
        common_here = {**common, "name": name, "variant": variant, "shape": shape}
        fields: dict[str, Any] = {"median": None, "detail": "asv has no value: it failed"}
        if value is not None:
            fields = by_unit(value, unit, higher=False) | dict(_spread(row, place, unit))
            spread = {key: row[key][place] for key in row if key.startswith("stats_") and row[key]}
            fields["extra"] = {key: kept(value) for key, value in spread.items()}
        results.append(
            ExternalResult(**common_here, **fields, commit=commit, created_at=created_at)
        )
    return results


def _spread(row: Mapping[str, Any], place: int, unit: str) -> Iterator[tuple[str, Any]]:
    """Yield the samples of a value, and their number; asv's own interval is one of 99 %."""
    samples = (row.get("samples") or [])[place : place + 1]
    if samples and samples[0]:
        times = tuple(by_unit(value, unit)["median"] for value in samples[0])
        yield from (("samples", times), ("n_samples", len(times)))
    elif repeats := (row.get("stats_repeat") or [])[place : place + 1]:
        yield "n_samples", int(repeats[0] or 0)


def _plain(text: object) -> str:
    """Return a parameter without the quotes of its `repr`."""
    return str(text).strip("'\"")
