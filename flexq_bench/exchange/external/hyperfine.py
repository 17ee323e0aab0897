"""hyperfine: the file of `--export-json`. Times are in seconds.

The tool (github.com/sharkdp/hyperfine) writes `results`: a command with its parameters, the mean,
median and other statistics, and the times of its runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from flexq_bench.exchange.external.result import (
    ExternalResult,
    Reading,
    collect,
    in_us,
    kept,
    list_of,
    of_samples,
    read_json,
    split_parameters,
)

_WHAT = "a hyperfine file: --export-json FILE"


def read(path: str) -> Reading:
    """Read the median time of each command. Raises UsageError if the file is of another format."""
    results = list_of(read_json(path, _WHAT), "results", path, _WHAT)
    return collect(
        (str(entry.get("command") if isinstance(entry, dict) else place), partial(_result, entry))
        for place, entry in enumerate(results, start=1)
    )


def _result(entry: Mapping[str, Any]) -> ExternalResult:
    shape, variant = split_parameters(entry.get("parameters") or {})
    times = tuple(in_us(value, "s", "a time") for value in entry.get("times") or ())
    _, low, high = of_samples(times) if len(times) > 1 else (None, None, None)
    failed = sum(code != 0 for code in entry.get("exit_codes") or ())
    others = ("mean", "stddev", "user", "system", "min", "max")
    return ExternalResult(
        name=str(entry["command"]),
        variant=variant,
        shape=shape,
        median=in_us(entry["median"], "s", "the median"),
        low=low,
        high=high,
        samples=times,
        n_samples=len(times),
        environment={"tool": "hyperfine", "statistic": "median"},
        extra={name: kept(entry.get(name)) for name in others},
        remarks=("the command failed in some of its runs",) if failed else (),
    )
