"""MLPerf Inference: `mlperf_log_summary.txt` of LoadGen.

The file (github.com/mlcommons/inference, loadgen) has lines `name : value`: the scenario, the
result of its rules, rates, and latencies in nanoseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import (
    MAX_BYTES,
    ExternalResult,
    Reading,
    by_unit,
    cleaned,
    collect,
)
from flexq_bench.runs.text_files import read_text

_WHAT = "an mlperf_log_summary.txt of LoadGen"
TITLE = "MLPerf Results Summary"
_PARAMETERS = "Test Parameters Used"
_NUMBER = re.compile(r"[\d.]+(?:e[+-]?\d+)?")
_PER_SECOND = re.compile(r"(?:QPS|.*\b(samples|queries|tokens) per second)\b.*", re.IGNORECASE)
_RULES = " satisfied"


def read(path: str) -> Reading:
    """Read rates and latencies by the file's names; an invalid run is remarked.

    Raises UsageError if the file is of another format.
    """
    text = read_text(path, _WHAT, most_bytes=MAX_BYTES)
    if TITLE not in text:
        raise UsageError(f"{path} has no {TITLE!r}: name {_WHAT}")
    head, _, tail = text.partition(_PARAMETERS)
    fields, parameters = _pairs(head), _pairs(tail)
    broken = [
        name.removesuffix(_RULES)
        for name, value in fields.items()
        if _RULES in name and value != "Yes"
    ]
    remarks: list[str] = []
    if fields.get("Result is") != "VALID":
        why = f" ({', '.join(broken)} not satisfied)" if broken else ""
        remarks.append(f"LoadGen's rules make it {fields.get('Result is', 'no result')}{why}")
    common: dict[str, Any] = {
        "name": cleaned(fields.get("SUT name") or "SUT"),
        "variant": f"{fields.get('Scenario', '')}",
        "environment": {"tool": "mlperf-loadgen", "mode": cleaned(fields.get("Mode", ""))},
        "remarks": tuple(remarks),
        "extra": {"parameters": dict(list(parameters.items())[:100])},
    }
    return collect(
        (name, partial(ExternalResult, **common, **values)) for name, values in _values(fields)
    )


def _values(fields: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in fields.items():
        if not _NUMBER.fullmatch(value):
            continue
        rate = _PER_SECOND.fullmatch(name)
        if name.endswith("(ns)"):
            metric = name.removesuffix("(ns)").strip()
            yield name, by_unit(value, "ns") | {"metric": metric}
        elif rate is not None and "Scheduled" not in name:  # scheduled: a setting
            thing = (rate[1] or "queries").lower()
            yield name, by_unit(value, f"{thing}/s", metric=name, higher=True) | {"metric": name}


def _pairs(text: str) -> dict[str, str]:
    parts = ([part.strip() for part in line.partition(":")] for line in text.splitlines())
    return {name: value for name, _, value in parts if name and value}
