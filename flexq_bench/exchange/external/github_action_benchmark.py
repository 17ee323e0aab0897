"""github-action-benchmark: `data.js` with the whole history, and its custom JSON.

data.js (github.com/benchmark-action/github-action-benchmark) assigns an object to
`window.BENCHMARK_DATA`; its `entries` are, by suite, the results of each commit. A custom file is a
list of objects with `name`, `unit` and `value`; whether more is better is only in the action's
settings, so that it is part of the format's name here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from flexq_bench.db.records import CommitInfo
from flexq_bench.errors import UsageError
from flexq_bench.exchange.external import go_benchmark
from flexq_bench.exchange.external.result import (
    BadResult,
    Entries,
    ExternalResult,
    Reading,
    cleaned,
    collect,
    commit_of,
    iso_time,
    kept,
    objects_with,
    of_epoch,
    of_values,
    read_value,
)

_WHAT = "the data.js of github-action-benchmark"
_CUSTOM = "a custom file of github-action-benchmark: a list of name, unit and value"
_ALSO = re.compile(r"(\S+) (\S+)")  # in a unit of Go: value and unit
START = "window.BENCHMARK_DATA"
# Tools that say which values are better; of the others this follows from the unit.
_HIGHER = {
    "benchmarkjs": True, "pytest": True, "customBiggerIsBetter": True,
    "customSmallerIsBetter": False,
}  # fmt: skip


def read(path: str) -> Reading:
    """Read every result of every commit, at the commit's time of measurement.

    A name that occurs several times in one entry was measured several times. Raises UsageError if
    the file is not of this format.
    """
    file = read_value(path, _WHAT, start=START)
    suites = file.get("entries") if isinstance(file, dict) else None
    if not isinstance(suites, dict):
        raise UsageError(f"{path} has no entries: name {_WHAT}")
    return collect(_entries(suites))


def read_custom(path: str, *, higher: bool) -> Reading:
    """Read a custom file. higher: more is better. Raises UsageError if it is not of this format."""
    benches = objects_with(read_value(path, _CUSTOM), ("name", "value", "unit"), path, _CUSTOM)
    return collect(_benches(benches, {"tool": "custom"}, higher, None, None))


def _entries(suites: Mapping[str, Any]) -> Entries:
    for suite, entries in suites.items():
        for place, entry in enumerate(entries if isinstance(entries, list) else [], start=1):
            try:
                about = entry["commit"]
                commit = commit_of(
                    about["id"],
                    subject=cleaned(str(about.get("message") or "").partition("\n")[0]),
                    author=cleaned((about.get("author") or {}).get("name") or ""),
                    committed_at=iso_time(about.get("timestamp")),
                )
                benches, tool = entry["benches"], str(entry.get("tool") or "")
                higher = _HIGHER.get(tool)
            except (BadResult, KeyError, TypeError, AttributeError) as error:
                yield f"{suite} entry {place}", partial(_refuse, f"it has no such commit: {error}")
                continue
            environment = {"tool": tool, "suite": suite}
            yield from _benches(benches, environment, higher, commit, of_epoch(entry.get("date")))


def _benches(
    benches: Sequence[Any],
    environment: dict[str, str],
    higher: bool | None,
    commit: CommitInfo | None,
    created_at: str | None,
) -> Entries:
    by_name: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for bench in _of_one_unit([bench if isinstance(bench, dict) else {} for bench in benches]):
        by_name[str(bench.get("name") or ""), str(bench.get("unit"))].append(bench)
    for (name, _), same in by_name.items():
        yield name, partial(_result, name, same, environment, higher, commit, created_at)


def _of_one_unit(benches: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the values of Go's benchmarks, whose unit is `ns/op\\t 16 B/op`, each with its own.

    The action repeats each of them as `NAME - UNIT`.
    """
    lines = {bench.get("name") for bench in benches if "\t" in str(bench.get("unit"))}
    for bench in benches:
        unit, _, others = str(bench.get("unit") or "").partition("\t")
        if str(bench.get("name")).removesuffix(f" - {unit}") in lines - {bench.get("name")}:
            continue
        yield {**bench, "unit": unit}
        for value, unit in _ALSO.findall(others):
            metric = go_benchmark.METRICS.get(unit, unit)
            yield {**bench, "value": value, "unit": unit, "metric": metric}


def _result(
    name: str,
    same: Sequence[Mapping[str, Any]],
    environment: dict[str, str],
    higher: bool | None,
    commit: CommitInfo | None,
    created_at: str | None,
) -> ExternalResult:
    metric = same[0].get("metric", "value")
    values = [bench["value"] for bench in same]
    quality = {key: kept(same[-1][key]) for key in ("range", "extra") if same[-1].get(key)}
    return ExternalResult(
        name=name,
        variant=environment.get("suite", ""),
        **of_values(values, same[0].get("unit"), metric=metric, higher=higher),
        environment=environment,
        extra=quality,
        commit=commit,
        created_at=created_at,
    )


def _refuse(reason: str) -> ExternalResult:
    raise BadResult(reason)
