"""BenchmarkTools of Julia: the file of `BenchmarkTools.save`. Times are in nanoseconds.

The file (github.com/JuliaCI/BenchmarkTools.jl) is a list of the versions and of the saved values: a
value is a pair of its type and its fields, and a BenchmarkGroup has others under `data`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import (
    Entries,
    ExternalResult,
    Reading,
    by_unit,
    cleaned,
    collect,
    in_us,
    of_repeated,
    read_value,
)

_WHAT = "a file of BenchmarkTools.save of Julia"
_MAX_DEPTH = 50


def read(path: str) -> Reading:
    """Read the times, memory and allocations of trials: of its samples the median.

    Raises UsageError if the file is of another format.
    """
    file = read_value(path, _WHAT)
    try:
        versions, values = file
        version = cleaned(versions["Julia"])
    except (ValueError, TypeError, KeyError):
        raise UsageError(f"{path} has no version of Julia: name {_WHAT}") from None
    environment = {"tool": "BenchmarkTools", "julia": version}
    names = [""] if len(values) == 1 else [str(place) for place in range(1, len(values) + 1)]
    entries = [
        entry
        for name, value in zip(names, values, strict=True)
        for entry in _entries(name, value, environment, _MAX_DEPTH)
    ]
    if not entries:
        raise UsageError(f"{path} has no trial, perhaps parameters only: name {_WHAT}")
    return collect(entries)


def _entries(name: str, value: Any, environment: dict[str, str], depth: int) -> Entries:
    kind, fields = value if isinstance(value, list) and len(value) == 2 else ("", None)
    kind = str(kind).removeprefix("BenchmarkTools.")  # of versions before 1
    if kind == "BenchmarkGroup" and isinstance(fields, dict) and depth:
        for key, member in (fields.get("data") or {}).items():
            below = f"{name}/{key}" if name else str(key)
            yield from _entries(below, member, environment, depth - 1)
    elif kind in ("Trial", "TrialEstimate") and isinstance(fields, dict):
        yield name or "benchmark", partial(_results, name or "benchmark", fields, environment)


def _results(
    name: str, fields: Mapping[str, Any], environment: dict[str, str]
) -> list[ExternalResult]:
    if "times" in fields:
        time = of_repeated([in_us(value, "ns", "a time") for value in fields["times"]])
    else:
        time = {"median": in_us(fields["time"], "ns", "the time")}
    statistic = environment | {"statistic": "median" if "times" in fields else "estimate"}
    results = [ExternalResult(name=name, variant="", **time, environment=statistic)]
    for key, unit in (("memory", "bytes"), ("allocs", "allocs")):
        value = by_unit(fields[key], unit, metric=key)
        results.append(ExternalResult(name=name, variant="", **value, environment=environment))
    return results
