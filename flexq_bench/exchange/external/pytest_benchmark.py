"""pytest-benchmark: the file of `--benchmark-json=FILE`. Times are in seconds.

The tool (pytest-benchmark.readthedocs.io) writes `machine_info`, `commit_info` and a list
`benchmarks` with `params` and `stats`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flexq_bench.exchange.external.result import (
    MAX_SAMPLES,
    ExternalResult,
    Reading,
    cleaned,
    collect,
    count,
    in_us,
    iso_time,
    kept,
    list_of,
    notches,
    read_json,
    split_parameters,
)

_WHAT = "a pytest-benchmark file: pytest --benchmark-json=FILE"
_SHA = re.compile(r"[0-9a-f]{40,64}")  # "unversioned" outside of a repository
_DIRTY = "measured with uncommitted changes"
_FAILED = "the benchmark raised an error, whose reason is not in the file"


def read(path: str) -> Reading:
    """Read median times by test and parameters, with raw samples if the file contains them.

    `--benchmark-save-data` adds the samples. The interval of a median is computed from the
    quartiles. Raises UsageError if the file is not of this format.
    """
    file = read_json(path, _WHAT)
    machine_info = file.get("machine_info")
    machine = machine_info if isinstance(machine_info, dict) else {}
    benchmarks = list_of(file, "benchmarks", path, _WHAT)
    commit_info = file.get("commit_info")
    commit = commit_info if isinstance(commit_info, dict) else {}
    remarks = (_DIRTY,) if commit.get("dirty") else ()
    entries = _entries(benchmarks, machine, cleaned(file.get("version", "")), remarks)
    reading = collect(entries, created_at=iso_time(file.get("datetime")))
    sha = commit.get("id")
    return replace(reading, commit=sha if _SHA.fullmatch(str(sha)) else None)


def _entries(
    benchmarks: list[Any], machine: Mapping[str, Any], version: str, remarks: tuple[str, ...]
) -> Iterator[tuple[str, Callable[[], ExternalResult]]]:
    for position, entry in enumerate(benchmarks, start=1):
        name = entry.get("fullname") if isinstance(entry, dict) else None
        yield (
            str(name or f"benchmark {position}"),
            partial(_result, entry, machine, version, remarks),
        )


def _split(full_name: str, name: str) -> tuple[str, str]:
    """Split `tests/test_a.py::test[1-64]` into the test and the identity of its parameters.

    name: `test[1-64]`. Folders in front of it may have brackets, too.
    """
    start = len(full_name) - len(name) if name and full_name.endswith(name) else 0
    test, _, identity = full_name[start:].partition("[")
    return full_name[:start] + test, identity.removesuffix("]")


def _result(
    entry: Mapping[str, Any], machine: Mapping[str, Any], version: str, remarks: tuple[str, ...]
) -> ExternalResult:
    name, identity = _split(str(entry["fullname"]), str(entry.get("name") or ""))
    parameters = entry.get("params")
    if isinstance(parameters, Mapping):
        shape, variant = split_parameters({str(k): v for k, v in parameters.items()})
    else:
        shape, variant = split_parameters({})
        variant = str(entry.get("param") or identity)
    cpu = machine.get("cpu")
    processor = cpu.get("brand_raw") if isinstance(cpu, Mapping) else None
    common: dict[str, Any] = {
        "name": name,
        "variant": variant,
        "shape": shape,
        "device": cleaned(processor or machine.get("processor") or machine.get("machine") or ""),
        "environment": {
            "tool": "pytest-benchmark",
            "tool_version": version,
            "python": cleaned(machine.get("python_version", "")),
        },
        "extra": {
            "group": cleaned(entry.get("group") or ""),
            "host": cleaned(machine.get("node", "")),
            "extra_info": kept(entry.get("extra_info")),
        },
        "remarks": remarks,
    }
    if entry.get("has_error"):
        return ExternalResult(**common, median=None, detail=cleaned(entry.get("error") or _FAILED))
    stats = entry["stats"]
    median, q1, q3 = (in_us(stats[key], "s", key) for key in ("median", "q1", "q3"))
    rounds = count(stats["rounds"], "rounds")
    low, high = notches(median, q1, q3, rounds) if rounds else (None, None)
    data = stats.get("data") or ()
    shortened = any(isinstance(value, str) for value in data)  # as "… 900 more"
    samples = (
        ()
        if shortened
        else tuple(in_us(value, "s", "a sample") for value in data[: MAX_SAMPLES + 1])
    )
    common["environment"]["statistic"] = "median"
    return ExternalResult(
        **common, median=median, low=low, high=high, samples=samples, n_samples=rounds
    )
