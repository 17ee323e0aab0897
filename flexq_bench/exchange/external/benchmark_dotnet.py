"""BenchmarkDotNet: the file of `--exporters fulljson` (or json). Times are in nanoseconds.

The tool (benchmarkdotnet.org) writes `HostEnvironmentInfo` and `Benchmarks` with `Parameters`,
`Statistics` of the iterations, and the `Metrics` of diagnosers, each with its unit and direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from flexq_bench.exchange.external.result import (
    ExternalResult,
    Reading,
    beside,
    cleaned,
    collect_each,
    count,
    in_us,
    kept,
    list_of,
    notches,
    read_json,
    split_parameters,
)

_WHAT = "a file of BenchmarkDotNet: --exporters fulljson"


def read(path: str) -> Reading:
    """Read the median of iterations, and what diagnosers measured.

    Raises UsageError if the file is of another format.
    """
    file = read_json(path, _WHAT)
    benchmarks = list_of(file, "Benchmarks", path, _WHAT)
    host = file.get("HostEnvironmentInfo") or {}
    return collect_each(benchmarks, partial(_results, host=host), "result", key="FullName")


def _results(benchmark: Mapping[str, Any], host: Mapping[str, Any]) -> Iterator[ExternalResult]:
    pairs = (pair.partition("=") for pair in str(benchmark.get("Parameters") or "").split("&"))
    shape, variant = split_parameters({key: value for key, sign, value in pairs if sign})
    job = _job(str(benchmark.get("DisplayInfo") or ""))
    names = (benchmark.get("Namespace"), benchmark["Type"], benchmark["Method"])
    remarks = ["a debugger was attached"] if host.get("HasAttachedDebugger") else []
    if str(host.get("Configuration", "")).upper() == "DEBUG":
        remarks.append("it is a debug build")
    common: dict[str, Any] = {
        "name": ".".join(filter(None, names)),
        "variant": ",".join(filter(None, (variant, job and f"job={job}"))),
        "shape": shape,
        "device": cleaned(host.get("ProcessorName") or ""),
        "remarks": tuple(remarks),
        "environment": {
            "tool": "BenchmarkDotNet",
            "tool_version": cleaned(host.get("BenchmarkDotNetVersion", "")),
            "runtime": cleaned(host.get("RuntimeVersion", "")),
            "statistic": "median",
        },
    }
    stats = benchmark.get("Statistics")
    if stats is None:
        yield ExternalResult(**common, median=None, detail="it has no statistics: it failed")
        return
    median, q1, q3 = (in_us(stats[key], "ns", key) for key in ("Median", "Q1", "Q3"))
    n = count(stats["N"], "N")
    low, high = notches(median, q1, q3, n) if n else (None, None)
    samples = tuple(in_us(v, "ns", "a value") for v in stats.get("OriginalValues") or ())
    yield ExternalResult(
        **common, median=median, low=low, high=high, samples=samples, n_samples=n,
        extra={"memory": kept(benchmark.get("Memory")), "mean_ns": kept(stats.get("Mean"))},
    )  # fmt: skip
    for metric in benchmark.get("Metrics") or ():
        about = metric["Descriptor"]
        of_diagnoser = cleaned(about["Id"]), metric.get("Value"), about.get("Unit")
        for fields in beside(*of_diagnoser, higher=bool(about.get("TheGreaterTheBetter"))):
            yield ExternalResult(**common, **fields)


def _job(shown: str) -> str:
    """Return the job of `Type.Method: Job(Count=3) [Parameter=1]`; empty: the default one."""
    job = shown.partition(": ")[2]
    job = job.partition(" [")[0] if job.endswith("]") else job
    return "" if job.startswith("DefaultJob") else job
