"""Catch2: the benchmarks of its console output, and of its XML reporter (`-r xml`).

Of each benchmark both have the mean and the standard deviation with their intervals; in XML
(github.com/catchorg/Catch2, docs/benchmarks.md) all values are nanoseconds.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from functools import partial
from typing import Any

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import (
    Entries,
    ExternalResult,
    Reading,
    cleaned,
    collect,
    console_text,
    count,
    in_us,
)

_WHAT = "the output of a Catch2 test with benchmarks, or its XML: -r xml"
_VALUE = r"([\d.e+-]+) (ns|us|µs|ms|s|m)"
_HEAD = re.compile(rf"(\S.*?)(?<!\s)\s++(\d++)\s++(\d++)\s++{_VALUE}\s*")
_THREE = re.compile(rf"\s+{_VALUE}\s+{_VALUE}\s+{_VALUE}\s*")
_PART = re.compile(r"(?!-{9}|\.{9}|={9}|benchmark name )\S.*")
_MINUTES = {"m": "min"}  # as Catch2 writes them


def read(path: str) -> Reading:
    """Read mean times with their intervals. Raises UsageError if there is no benchmark."""
    text = console_text(path, _WHAT)
    entries = list(_of_xml(path, text) if text.lstrip().startswith("<") else _of_text(text))
    if not entries:
        raise UsageError(f"{path} has no benchmark: name {_WHAT}")
    return collect(entries)


def _of_xml(path: str, text: str) -> Entries:
    if "<!" in text.replace("<!--", ""):
        raise UsageError(f"{path} declares entities, which Catch2 does not: name {_WHAT}")
    try:
        root = ET.fromstring(text)
    except ET.ParseError:
        raise UsageError(f"{path} is no XML, or cut off: name {_WHAT}") from None
    for case in root.iter("TestCase"):
        for benchmark in case.iter("BenchmarkResults"):
            yield str(benchmark.get("name")), partial(_element, str(case.get("name")), benchmark)


def _element(case: str, benchmark: ET.Element) -> ExternalResult:
    mean, deviation = benchmark.find("mean"), benchmark.find("standardDeviation")
    if (failed := benchmark.find("failed")) is not None:
        detail = cleaned(failed.get("message") or "it failed")
        common: dict[str, Any] = {"detail": detail, "environment": {"tool": "catch2"}}
        return ExternalResult(benchmark.attrib["name"], case, None, **common)
    if mean is None:
        raise KeyError("mean")
    values = [(mean.attrib[key], "ns") for key in ("value", "lowerBound", "upperBound")]
    spread = None if deviation is None else in_us(deviation.get("value"), "ns", "the deviation")
    return _result(benchmark.attrib["name"], case, benchmark.attrib["samples"], values, spread)


def _of_text(text: str) -> Iterator[tuple[str, partial[ExternalResult]]]:
    head: re.Match[str] | None = None
    wrapped, name = "", ""
    for line in (lines := iter(text.splitlines())):
        three = _THREE.fullmatch(line)
        if head is not None and three is not None:
            deviation = _THREE.fullmatch(next(lines, ""))
            spread = None if deviation is None else in_us(deviation[1], _unit(deviation[2]), "it")
            values = [(three[place], _unit(three[place + 1])) for place in (1, 3, 5)]
            yield name, partial(_result, name, "", head[2], values, spread)
        head = _HEAD.fullmatch(line)
        if head is not None:
            name = f"{wrapped} {head[1]}".strip()
        is_part = head is None and _PART.fullmatch(line) is not None  # of a long name
        wrapped = f"{wrapped} {line.strip()}" if is_part else ""


def _unit(text: str) -> str:
    return _MINUTES.get(text, text)


def _result(
    name: str, case: str, samples: str, values: list[tuple[str, str]], deviation: float | None
) -> ExternalResult:
    mean, low, high = (in_us(value, unit, "the mean") for value, unit in values)
    n_samples = count(samples, "samples")
    return ExternalResult(
        *(name, case, mean, low, high), n_samples=n_samples,
        environment={"tool": "catch2", "statistic": "mean"},
        extra={} if deviation is None else {"stddev_us": deviation},
    )  # fmt: skip
