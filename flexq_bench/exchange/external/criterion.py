"""Criterion.rs: the output of `cargo criterion --message-format=json`, its text, or its folder.

The messages, one JSON object per line, are described in its book ("External Tools",
bheisler.github.io/criterion.rs/book): a `benchmark-complete` with samples and estimates for each
benchmark. In target/criterion, which `cargo bench` writes, the newest results of a benchmark are in
a folder `new`: benchmark.json contains its name, estimates.json and sample.json contain
nanoseconds. In the text that is printed, `time:   [26.0 µs 26.2 µs 26.5 µs]` are the estimate
between its bounds, after the name, or in the line below a long one. Benchmarks of Rust's own
harness print `test NAME ... bench: 1,234 ns/iter (+/- 56)`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import (
    BadResult,
    ExternalResult,
    Reading,
    by_unit,
    collect,
    console_text,
    in_us,
    number,
    read_json,
)

_WHAT = "the output of cargo bench, or of cargo criterion as JSON, or the folder target/criterion"
_VALUE = r"([\d.]+) (\S+)"
_ESTIMATE = re.compile(rf"(.*?)(time|thrpt): ++\[{_VALUE} {_VALUE} {_VALUE}\]\s*")
_HARNESS = re.compile(
    r"test (\S.*?)(?<! ) ++\.\.\. bench: ++([\d,.]+) (\w+)/iter(?: \(\+/- ([\d,.]+)\))?.*"
)


def read(path: str) -> Reading:
    """Read medians with their intervals, and samples, by benchmark.

    A benchmark `group/function/value` becomes a function of its group with a parameter. Other
    messages are ignored. Raises UsageError for a file without any message, or a folder without
    results.
    """
    if Path(path).is_dir():
        files = sorted(Path(path).rglob("new/benchmark.json"))
        if not files:
            raise UsageError(f"{path} holds no new/benchmark.json: name {_WHAT}")
        return collect(
            (str(file.parent.parent), partial(_of_folder, file.parent)) for file in files
        )
    lines = console_text(path, _WHAT).splitlines()
    messages = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not any('"reason"' in line for _, line in messages):
        entries = list(_of_text(lines))
        if not entries:
            raise UsageError(f"{path} holds no message of Criterion: name {_WHAT}")
        return collect(entries)
    return collect(_entries(messages))


def _entries(
    messages: list[tuple[int, str]],
) -> Iterator[tuple[str, Callable[[], ExternalResult | None]]]:
    for place, line in messages:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        name = message.get("id") if isinstance(message, dict) else None
        yield str(name or f"line {place}"), partial(_result, message)


def _of_text(lines: Sequence[str]) -> Iterator[tuple[str, Callable[[], ExternalResult]]]:
    name = before = ""
    for line in lines:
        if (estimate := _ESTIMATE.fullmatch(line)) is not None:
            own = estimate[1].strip()
            name = own or (name if estimate[2] == "thrpt" else before.strip())
            yield f"{name} {estimate[2]}", partial(_printed, name, estimate)
        elif (bench := _HARNESS.fullmatch(line)) is not None:
            yield bench[1], partial(_of_harness, bench)
        before = line


def _printed(name: str, estimate: re.Match[str]) -> ExternalResult:
    low, value, high = (
        by_unit(estimate[place], estimate[place + 1].replace("elem/s", "items/s"))
        for place in (3, 5, 7)
    )
    ends = {"low": low["median"], "high": high["median"]}
    return ExternalResult(**_named(name, "estimate"), **value, **ends)


def _of_harness(bench: re.Match[str]) -> ExternalResult:
    value = in_us(bench[2].replace(",", ""), bench[3], "the time")
    deviation = bench[4] and in_us(bench[4].replace(",", ""), bench[3], "the deviation")
    extra = {"deviation_us": deviation} if deviation is not None else {}
    return ExternalResult(**_named(bench[1]), median=value, extra=extra)


def _result(message: object) -> ExternalResult | None:
    if not isinstance(message, Mapping):
        raise BadResult("it is no JSON object")
    if message.get("reason") != "benchmark-complete":
        return None
    estimate: Mapping[str, Any] = message["median"]
    unit = estimate["unit"]
    counts = message.get("iteration_count") or ()
    values = message.get("measured_values") or ()
    times = _samples(values, counts, message.get("unit"))
    ends = (by_unit(estimate[f"{end}_bound"], unit)["median"] for end in ("lower", "upper"))
    return ExternalResult(
        **_named(message["id"]),
        **by_unit(estimate["estimate"], unit),
        **dict(zip(("low", "high"), ends, strict=True)),
        samples=times,
        n_samples=len(times),
    )


def _of_folder(folder: Path) -> ExternalResult:
    try:
        about, estimates, sample = (
            read_json(str(folder / f"{name}.json"), _WHAT)
            for name in ("benchmark", "estimates", "sample")
        )
    except UsageError as error:
        raise BadResult(str(error)) from None
    median = estimates["median"]
    interval = median["confidence_interval"]
    samples = _samples(sample["times"], sample["iters"], "ns")
    return ExternalResult(
        **_named(about["full_id"]),
        median=in_us(median["point_estimate"], "ns", "the median"),
        low=in_us(interval["lower_bound"], "ns", "the lower bound"),
        high=in_us(interval["upper_bound"], "ns", "the upper bound"),
        samples=samples,
        n_samples=len(samples),
    )


def _samples(values: Sequence[Any], counts: Sequence[Any], unit: object) -> tuple[float, ...]:
    """Return each sample per iteration, of a time in microseconds."""
    if len(counts) != len(values):
        raise BadResult("it has not one measured value for each iteration count")
    times = []
    for value, iterations in zip(values, counts, strict=True):
        launches = number(iterations, "an iteration count")
        if launches < 1:
            raise BadResult("an iteration count is below 1")
        times.append(by_unit(value, unit)["median"] / launches)
    return tuple(times)


def _named(identity: object, statistic: str = "median") -> dict[str, Any]:
    stem, _, parameter = str(identity).rpartition("/")
    return {
        "name": stem or parameter,
        "variant": parameter if stem else "",
        "environment": {"tool": "criterion", "statistic": statistic},
    }
