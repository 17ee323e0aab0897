"""Metrics of served speed, each with its unit and direction.

| name | unit | better | meaning |
| --- | --- | --- | --- |
| `median_ttft`, `p99_ttft`, `mean_ttft` | ms | lower | time to the first token |
| `…_tpot` | ms | lower | time between the tokens after the first one, the mean of a request |
| `…_e2e` | ms | lower | time to the last token |
| `tokens_per_s` | tokens/s | higher | new tokens of answered requests |
| `requests_per_s` | requests/s | higher | answered requests |
| `goodput` | requests/s | higher | answered requests within the limits of ttft, tpot and e2e |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flexq_bench.served.speed.load import RequestTimes, Segment
from flexq_bench.stats.block_bootstrap import block_quantile_intervals
from flexq_bench.stats.bootstrap import Interval
from flexq_bench.stats.paired import mean_difference_interval
from flexq_bench.workloads.errors import WorkloadError

_LATENCY = re.compile(r"(?:(mean|median)|p([1-9][0-9]?))_(ttft|tpot|e2e)")
_RATES = {"tokens_per_s": "tokens/s", "requests_per_s": "requests/s", "goodput": "requests/s"}
_MS = 1e3


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. share: of the quantile; None: a mean, or a rate. part: ttft, tpot, e2e or empty."""

    name: str
    unit: str
    is_lower_better: bool
    part: str = ""
    share: float | None = None

    @property
    def direction(self) -> str:
        """Better direction, in the words of records."""
        return "lower" if self.is_lower_better else "higher"

    def cost(self, value: float) -> float:
        """Return a number that is lower if the value is better, as verdicts take it."""
        if not value > 0:
            return math.nan
        return value if self.is_lower_better else 1 / value

    def change_percent(self, log_cost: float) -> float:
        """Return the change of the metric itself, in percent, for a change of ln(cost)."""
        return 100 * math.expm1(log_cost if self.is_lower_better else -log_cost)


def metric(name: str) -> Metric:
    """Return the metric of this name. Raises WorkloadError if there is none."""
    if name in _RATES:
        return Metric(name, _RATES[name], is_lower_better=False)
    match = _LATENCY.fullmatch(name)
    if match is None:
        raise WorkloadError(
            f"no metric {name!r}: mean, median or p99, then _ttft, _tpot or _e2e; or "
            f"{', '.join(_RATES)}"
        )
    share = 0.5 if match[1] == "median" else int(match[2]) / 100 if match[2] else None
    return Metric(name, "ms", True, match[3], share)


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Largest times of a request that counts for goodput, ms; None: any."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def keeps(self, times: RequestTimes) -> bool:
        """Return True if a request was answered within all limits."""
        parts = (
            (times.ttft_s, self.ttft_ms),
            (times.tpot_s, self.tpot_ms),
            (times.e2e_s, self.e2e_ms),
        )
        return times.is_ok and all(
            most is None or value is None or _MS * value <= most for value, most in parts
        )


def segment_value(of: Metric, segment: Segment, limits: LatencyLimits) -> float:
    """Return the value of a metric on a segment; NaN: no request has one."""
    if of.part:
        values = _latencies(of, segment)
        if not values:
            return math.nan
        return float(np.mean(values) if of.share is None else np.quantile(values, of.share))
    answered = [request for request in segment.times if request.is_ok]
    if of.name == "tokens_per_s":
        amount = float(sum(request.new_tokens for request in answered))
    elif of.name == "requests_per_s":
        amount = float(len(answered))
    else:
        # Half a request more, so that a segment without a good one has a logarithm (Haldane 1956).
        amount = sum(map(limits.keeps, segment.times)) + 0.5
    return amount / segment.seconds if amount else math.nan


def pooled_interval(
    of: Metric, segments: Sequence[Segment], limits: LatencyLimits, *, seed: int
) -> Interval | None:
    """Return a metric over all segments of an engine, with its interval by segments.

    Requests of one segment shared the engine, so segments count, not requests. A quantile is that
    of all requests if each segment has as many; otherwise, and for other metrics, the mean of the
    segments' values. None: there is no value.
    """
    rows = [_latencies(of, segment) for segment in segments] if of.part else []
    if of.share is not None and rows and rows[0] and len({len(row) for row in rows}) == 1:
        return block_quantile_intervals(rows, (of.share,))[0]
    values = [segment_value(of, segment, limits) for segment in segments]
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return None
    if len(known) == 1:
        return Interval(known[0], known[0], known[0])
    return mean_difference_interval(np.zeros(len(known)), known, seed=seed)


def _latencies(of: Metric, segment: Segment) -> list[float]:
    """Return the metric's part of each request that has one, ms.

    A failed request counts as the slowest of those that were answered, or by the time until it
    failed if that is longer, so that an engine is not faster for the requests that it drops.
    """
    read: Callable[[RequestTimes], float | None] = {
        "ttft": lambda request: request.ttft_s,
        "tpot": lambda request: request.tpot_s,
        "e2e": lambda request: request.e2e_s,
    }[of.part]
    known = [_MS * value for request in segment.times if (value := read(request)) is not None]
    if not known:
        return []
    slowest = max(known)
    until = [
        0.0 if of.part == "tpot" else _MS * (request.end_s - request.due_s)
        for request in segment.times
    ]
    return known + [
        max(slowest, time)
        for request, time in zip(segment.times, until, strict=True)
        if not request.is_ok
    ]
