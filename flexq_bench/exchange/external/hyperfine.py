"""hyperfine: the file of `--export-json`. Times are in seconds.

The tool (github.com/sharkdp/hyperfine) writes `results`: a command with its parameters, the mean,
median and other statistics, and the times of its runs; newer versions also the memory of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flexq_bench.exchange.external.result import (
    ExternalResult,
    Reading,
    collect_each,
    in_us,
    kept,
    list_of,
    of_samples,
    of_values,
    read_json,
    split_parameters,
)

_WHAT = "a hyperfine file: --export-json FILE"
_OTHERS = ("mean", "stddev", "user", "system", "min", "max")


def read(path: str) -> Reading:
    """Read the median time of each command, and of its peak memory.

    Raises UsageError if the file is of another format.
    """
    results = list_of(read_json(path, _WHAT), "results", path, _WHAT)
    return collect_each(results, _results, "result", key="command")


def _results(entry: Mapping[str, Any]) -> Iterator[ExternalResult]:
    shape, variant = split_parameters(entry.get("parameters") or {})
    times = tuple(in_us(value, "s", "a time") for value in entry.get("times") or ())
    _, low, high = of_samples(times) if len(times) > 1 else (None, None, None)
    failed = sum(code != 0 for code in entry.get("exit_codes") or ())
    common: dict[str, Any] = {
        "name": str(entry["command"]),
        "variant": variant,
        "shape": shape,
        "environment": {"tool": "hyperfine", "statistic": "median"},
        "remarks": ("the command failed in some of its runs",) if failed else (),
    }
    yield ExternalResult(
        **common,
        median=in_us(entry["median"], "s", "the median"),
        low=low,
        high=high,
        samples=times,
        n_samples=len(times),
        extra={name: kept(entry.get(name)) for name in _OTHERS},
    )
    if memory := entry.get("memory_usage_byte"):
        yield ExternalResult(**common, **of_values(memory, "bytes", metric="memory"))
