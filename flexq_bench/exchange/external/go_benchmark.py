"""Go: the output of `go test -bench`, also with `-json`.

The form is that of pkg.go.dev/golang.org/x/perf/benchfmt: lines of configuration (`pkg:`, `cpu:`),
of units (`Unit widgets better=higher`), and lines `BenchmarkName/parameter=value-procs iterations
value unit value unit …`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import (
    ExternalResult,
    Reading,
    cleaned,
    collect,
    console_text,
    of_values,
    split_parameters,
)

_WHAT = "the output of go test -bench"
_UNIT = re.compile(r"Unit (\S+) (?:.*\s)?better=(higher|lower)(?:\s.*)?")
LINE = re.compile(r"(Benchmark\S*)[ \t]+(\d+)((?:[ \t]+\S+[ \t]+[^\s]+)+)[ \t]*")
_SETTING = re.compile(r"(goos|goarch|pkg|cpu): (.*)")
_PROCS = re.compile(r"-(\d+)$")
METRICS = {"ns/op": "time", "MB/s": "throughput"}


def read(path: str) -> Reading:
    """Read times, and what else a line has, by benchmark; with `-count` the median of its lines.

    Raises UsageError if no line is a result.
    """
    settings: dict[str, str] = {}
    measured: dict[tuple[str, str, str], tuple[dict[str, str], list[str]]] = {}
    higher: dict[str, bool] = {}
    for line in _output(console_text(path, _WHAT)).splitlines():
        if (of_unit := _UNIT.fullmatch(line.strip())) is not None:
            higher[of_unit[1]] = of_unit[2] == "higher"
        elif (setting := _SETTING.fullmatch(line.strip())) is not None:
            settings[setting[1]] = setting[2]
        elif (match := LINE.fullmatch(line)) is not None:
            values = match[3].split()
            for value, unit in zip(values[::2], values[1::2], strict=True):
                key = (settings.get("pkg", ""), match[1], unit)
                measured.setdefault(key, (dict(settings), []))[1].append(value)
    if not measured:
        raise UsageError(f"{path} has no line of a benchmark: name {_WHAT}")
    return collect(
        (f"{key[1]} {key[2]}", partial(_result, key, values, context, higher.get(key[2])))
        for key, (context, values) in measured.items()
    )


def _output(text: str) -> str:
    """Return the output within the events of `-json`; other text as it is."""
    if not text.startswith("{"):
        return text
    try:
        events = [json.loads(line) for line in text.splitlines() if line.strip()]
        return "".join(event.get("Output", "") for event in events)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return text


def _result(
    key: tuple[str, str, str], values: Sequence[str], settings: dict[str, str], higher: bool | None
) -> ExternalResult:
    package, full_name, unit = key
    procs = _PROCS.search(full_name)
    name, *parts = _PROCS.sub("", full_name).split("/")
    named = (part.partition("=") for part in parts)
    parameters = {
        key if sign else f"arg{place}": value if sign else key
        for place, (key, sign, value) in enumerate(named)
    } | ({"procs": procs[1]} if procs else {})
    shape, variant = split_parameters(parameters)
    metric = METRICS.get(unit, unit)
    return ExternalResult(
        name=f"{package}.{name}" if package else name,
        variant=variant,
        shape=shape,
        **of_values(values, unit, metric=metric, higher=higher) | {"metric": metric},
        device=cleaned(settings.get("cpu", "")),
        environment={"tool": "go", "os": cleaned(settings.get("goos", ""))},
    )
