"""JMH, of Java: the file of `-rf json`.

The tool (github.com/openjdk/jmh) writes a list: a benchmark with its mode, its parameters, the
`primaryMetric` with the score of each iteration of each fork, and secondary metrics of profilers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from flexq_bench.exchange.external.result import (
    ExternalResult,
    Reading,
    beside,
    by_unit,
    cleaned,
    collect_each,
    kept,
    objects_with,
    read_value,
    split_parameters,
)

_WHAT = "a JMH file: -rf json -rff FILE"
_Z_95 = 1.96


def read(path: str) -> Reading:
    """Read scores, which are means, with the iterations as samples; rates are better if higher.

    Raises UsageError if the file is of another format.
    """
    entries = objects_with(read_value(path, _WHAT), ("benchmark", "primaryMetric"), path, _WHAT)
    return collect_each(entries, _results, "result", key="benchmark")


def _results(entry: Mapping[str, Any]) -> Iterator[ExternalResult]:
    shape, variant = split_parameters(entry.get("params") or {})
    mode = str(entry["mode"])
    common: dict[str, Any] = {
        "name": str(entry["benchmark"]),
        "variant": ",".join(filter(None, (variant, f"mode={mode}"))),
        "shape": shape,
        "environment": {
            "tool": "jmh", "tool_version": cleaned(entry.get("jmhVersion", "")),
            "jvm": cleaned(f"{entry.get('vmName', '')} {entry.get('vmVersion', '')}".strip()),
            "threads": cleaned(entry.get("threads", "")), "statistic": "mean",
        },
    }  # fmt: skip
    settings = ("forks", "warmupIterations", "measurementIterations", "jvmArgs")
    extra = {name: kept(entry[name]) for name in settings if name in entry}
    score = entry["primaryMetric"]
    if str(score["score"]) == "NaN":
        yield ExternalResult(**common, median=None, detail="it has no score: NaN", extra=extra)
        return
    primary = by_unit(score["score"], score["scoreUnit"])
    yield ExternalResult(**common, **primary, **_spread(primary, score), extra=extra)
    # Less of what profilers measured, such as `·gc.alloc.rate.norm`, is better; more operations of
    # the methods of a group, and of counters.
    for name, metric in (entry.get("secondaryMetrics") or {}).items():
        unit = metric.get("scoreUnit")
        named = str(name).lstrip("·+"), metric.get("score"), unit
        for fields in beside(*named, higher=str(unit).startswith("ops/")):
            yield ExternalResult(**common, **fields, **_spread(fields, metric))


def _spread(fields: Mapping[str, Any], metric: Mapping[str, Any]) -> dict[str, Any]:
    """Return the iterations of a score as samples, and the interval of their mean."""
    unit = metric["scoreUnit"]
    raw = [value for fork in metric.get("rawData") or () for value in fork]
    samples = tuple(by_unit(value, unit, higher=False)["median"] for value in raw)
    spread: dict[str, Any] = {"samples": samples, "n_samples": len(samples)}
    if len(samples) > 1:
        # The file's own interval is one of 99.9 %.
        reach = _Z_95 * statistics.stdev(samples) / math.sqrt(len(samples))
        spread |= {"low": fields["median"] - reach, "high": fields["median"] + reach}
    return spread
