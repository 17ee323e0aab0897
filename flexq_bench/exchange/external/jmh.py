"""JMH, of Java: the file of `-rf json`.

The tool (github.com/openjdk/jmh) writes a list: a benchmark with its mode, its parameters, the
`primaryMetric` with the score of each iteration of each fork, and secondary metrics of profilers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from flexq_bench.exchange.external.result import (
    ExternalResult,
    Reading,
    by_unit,
    cleaned,
    collect,
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
    return collect(
        (str(entry.get("benchmark") if isinstance(entry, dict) else ""), partial(_results, entry))
        for entry in entries
    )


def _results(entry: Mapping[str, Any]) -> list[ExternalResult]:
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
    primary = ExternalResult(**common, **_score(entry["primaryMetric"], "value"), extra=extra)
    return [primary, *_secondary(entry.get("secondaryMetrics") or {}, common)]


def _secondary(metrics: Mapping[str, Any], common: Mapping[str, Any]) -> Iterator[ExternalResult]:
    """Yield what profilers measured, such as `·gc.alloc.rate.norm`: less of it is better."""
    for name, metric in metrics.items():
        if str(metric.get("score")) != "NaN":
            fields = _score(metric, str(name).lstrip("·+"), higher=False)
            yield ExternalResult(**common, **fields | {"metric": str(name).lstrip("·+")})


def _score(metric: Mapping[str, Any], name: str, *, higher: bool | None = None) -> dict[str, Any]:
    unit = metric["scoreUnit"]
    fields = by_unit(metric["score"], unit, metric=name, higher=higher)
    raw = [value for fork in metric.get("rawData") or () for value in fork]
    samples = tuple(by_unit(value, unit, higher=higher)["median"] for value in raw)
    if len(samples) > 1:
        # The file's own interval is one of 99.9 %.
        reach = _Z_95 * statistics.stdev(samples) / math.sqrt(len(samples))
        fields |= {"low": fields["median"] - reach, "high": fields["median"] + reach}
    return fields | {"samples": samples, "n_samples": len(samples)}
