"""k6: the end-of-test summary, as `--summary-export` writes it or `handleSummary` gets it.

Both have `metrics` by name. Trends have percentiles in milliseconds, rates a share, counters a
number and its rate (grafana.com/docs/k6). In the second form they are within `values`, and a metric
has its `type` and `contains`. `--new-machine-readable-summary` writes a list of such metrics in
`results`, with counts but without their rates, and the seconds of the test in `config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import (
    ExternalResult,
    Reading,
    beside,
    by_unit,
    collect,
    read_json,
)

_WHAT = "a summary of k6: --summary-export FILE"
_TIMES = ("http_req_", "grpc_req_", "ws_", "browser_", "iteration_duration", "group_duration")
_BETTER_HIGH = ("checks",)  # of rates; others are shares of failures
_BYTES = ("data_received", "data_sent")
_COUNTS = ("passes", "fails", "matches", "total")
_SETTINGS = ("vus", "vus_max")


def read(path: str) -> Reading:
    """Read medians as times, and means, percentiles and rates as metrics of their own.

    Raises UsageError if the file is of another format.
    """
    file = read_json(path, _WHAT)
    metrics = file.get("metrics") or _listed(file)
    if not isinstance(metrics, dict) or not any(isinstance(v, dict) for v in metrics.values()):
        raise UsageError(f"{path} has no metrics: name {_WHAT}")
    return collect((name, partial(_results, name, metric)) for name, metric in metrics.items())


def _listed(file: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        seconds = file["config"]["duration"]
        listed = {metric["name"]: metric for metric in file["results"]["metrics"]}
        counts = {
            name: {**metric, "values": {**values, "rate": values["count"] / seconds}}
            for name, metric in listed.items()
            if "count" in (values := metric["values"]) and seconds
        }
    except (KeyError, TypeError):
        return None
    return listed | counts


def _results(full_name: str, metric: Mapping[str, Any]) -> list[ExternalResult]:
    name, _, tags = full_name.partition("{")
    if name in _SETTINGS:
        return []
    values = metric.get("values", metric)
    remarks = tuple(
        f"the threshold {rule} was crossed"
        for rule, state in (metric.get("thresholds") or {}).items()
        if (not state.get("ok", True) if isinstance(state, dict) else state)
    )
    common: dict[str, Any] = {"environment": {"tool": "k6"}, "remarks": remarks}
    return [
        ExternalResult(name, tags.removesuffix("}"), **fields, **common)
        for fields in _fields(name, metric, values)
    ]


def _fields(
    name: str, metric: Mapping[str, Any], values: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    if "med" in values:  # a trend
        is_time = metric.get("contains") == "time" or (
            "contains" not in metric and name.startswith(_TIMES)
        )
        for statistic, value in values.items():
            if statistic in ("count", "thresholds") or not isinstance(value, int | float):
                continue
            own = "time" if statistic == "med" and is_time else statistic
            yield from beside(own, value, "ms" if is_time else "")  # 0 ms: nothing to wait for
    elif "passes" in values or "matches" in values:
        share = values.get("rate", values.get("value"))
        fields = by_unit(share, "fraction", metric="rate", higher=name in _BETTER_HIGH)
        yield fields | {"extra": {key: values[key] for key in _COUNTS if key in values}}
    elif "rate" in values and "count" in values:
        unit = "B/s" if name in _BYTES else "1/s"
        yield from beside("rate", values["rate"], unit, higher=name != "dropped_iterations")
    elif "value" in values:
        yield by_unit(values["value"], "", metric="value")
