"""Criterion.rs: the output of `cargo criterion --message-format=json`, one object a line.

The messages are those of its book ("External Tools", bheisler.github.io/criterion.rs/book): of
each benchmark a `benchmark-complete` with samples and estimates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from flexq_bench.errors import UsageError
from flexq_bench.runs.outside.result import (
    MOST_BYTES,
    BadResult,
    OutsideResult,
    Reading,
    collect,
    in_us,
    number,
)
from flexq_bench.runs.text_files import read_text

_WHAT = "the output of cargo criterion --message-format=json"


def read(path: str) -> Reading:
    """Medians with their intervals, and the samples, by benchmark.

    A benchmark `group/function/value` is the function of its group with a parameter. Other messages
    are left out. Raises UsageError for a file without any message.
    """
    lines = read_text(path, _WHAT, most_bytes=MOST_BYTES).splitlines()
    messages = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not any('"reason"' in line for _, line in messages):
        raise UsageError(f"{path} holds no message of Criterion: name {_WHAT}")
    return collect(_entries(messages))


def _entries(
    messages: list[tuple[int, str]],
) -> Iterator[tuple[str, Callable[[], OutsideResult | None]]]:
    for place, line in messages:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        name = message.get("id") if isinstance(message, dict) else None
        yield str(name or f"line {place}"), partial(_result, message)


def _result(message: object) -> OutsideResult | None:
    if not isinstance(message, Mapping):
        raise BadResult("it is no JSON object")
    if message.get("reason") != "benchmark-complete":
        return None
    estimate: Mapping[str, Any] = message["median"]
    unit = estimate["unit"]
    counts = message.get("iteration_count") or ()
    values = message.get("measured_values") or ()
    if len(counts) != len(values):
        raise BadResult("it has not one measured value for each iteration count")
    times = []
    for value, iterations in zip(values, counts, strict=True):
        launches = number(iterations, "an iteration count")
        if launches < 1:
            raise BadResult("an iteration count is below 1")
        times.append(in_us(value, message["unit"], "a measured value") / launches)
    stem, _, parameter = str(message["id"]).rpartition("/")
    return OutsideResult(
        name=stem or parameter,
        variant=parameter if stem else "",
        median=in_us(estimate["estimate"], unit, "the median"),
        low=in_us(estimate["lower_bound"], unit, "the lower bound"),
        high=in_us(estimate["upper_bound"], unit, "the upper bound"),
        samples=tuple(times),
        n_samples=len(times),
        environment={"tool": "criterion", "statistic": "median"},
    )
