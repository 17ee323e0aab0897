"""Results of a run relative to a baseline kernel and the read floor of the same run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from flexq_bench.stats import Interval, ratio_interval
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.operation import natural_order
from flexq_bench.workloads.probes import calibrates, floor_kernel, is_probe

BASELINE = "cublaslt-w8a8"

_Group = tuple[object, ...]


class Result(Protocol):
    """Fields that a row needs: those of a db.records.Record, with the same names and units."""

    @property
    def kernel(self) -> str: ...
    @property
    def variant(self) -> str: ...
    @property
    def stage(self) -> str: ...
    @property
    def cache(self) -> str: ...
    @property
    def gpu(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def layer(self) -> str: ...
    @property
    def operation(self) -> str: ...
    @property
    def parameters(self) -> str: ...
    @property
    def m(self) -> int | None: ...
    @property
    def n(self) -> int | None: ...
    @property
    def k(self) -> int | None: ...
    @property
    def weight_bits(self) -> int: ...
    @property
    def regime(self) -> str | None: ...
    @property
    def status(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def median_us(self) -> float | None: ...
    @property
    def ci_low_us(self) -> float | None: ...
    @property
    def ci_high_us(self) -> float | None: ...
    @property
    def floor_us(self) -> float | None: ...
    @property
    def pct_of_floor(self) -> float | None: ...
    @property
    def exact(self) -> bool | None: ...


R = TypeVar("R", bound=Result)
R_co = TypeVar("R_co", bound=Result, covariant=True)


@dataclass(frozen=True, slots=True)
class Row(Generic[R_co]):
    """A result and its two ratios, each with its interval.

    speedup: baseline median / median, over the baseline's same case. pct_of_floor: 100 · floor /
    median. None: one of the two times is missing, wrong or not a GEMM's.
    """

    result: R_co
    speedup: Interval | None
    pct_of_floor: Interval | None


def compare_with_baseline(results: Iterable[R], baseline: str = BASELINE) -> list[Row[R]]:
    """Rows ordered by shape, stage, cache, regime, GPU and M; the order within such a group is
    kept.

    results: of one run. baseline: a kernel's label. A ratio needs two comparable times: both
    kernels correct and timed.
    """
    ordered = sorted(results, key=_group)
    times = {id(r): time for r in ordered if (time := time_of(r)) is not None}
    baselines = {
        _group(r): times[id(r)]
        for r in ordered
        if id(r) in times and kernel_label(r.kernel, r.variant) == baseline
    }
    floors: defaultdict[object, list[Interval]] = defaultdict(list)
    for result in ordered:
        if calibrates(result.kernel) and id(result) in times:
            floors[_place(result), result.kernel].append(times[id(result)])

    def row(result: R) -> Row[R]:
        time = times.get(id(result))
        if time is None or is_probe(result.kernel):
            return Row(result, None, None)
        base = baselines.get(_group(result))
        is_base = kernel_label(result.kernel, result.variant) == baseline
        probed = floors[_place(result), floor_kernel(result.weight_bits)]
        return Row(
            result,
            Interval(1.0, 1.0, 1.0) if is_base else base and ratio_interval(base, time),
            floor_share(result, time, probed),
        )

    return [row(result) for result in ordered]


def time_of(result: Result) -> Interval | None:
    """The median with its interval, microseconds; None: wrong, or never timed."""
    median = result.median_us
    if result.status not in ("ok", "noisy") or not median:
        return None
    low, high = result.ci_low_us, result.ci_high_us
    return Interval(median, median if low is None else low, median if high is None else high)


def half_width_percent(result: Result) -> float | None:
    """Half the confidence interval, in percent of the median; None: there is no interval."""
    low, median, high = result.ci_low_us, result.median_us, result.ci_high_us
    if low is None or high is None or not median:
        return None
    return 100.0 * (high - low) / 2 / median


def floor_share(result: Result, time: Interval, probed: Sequence[Interval]) -> Interval | None:
    """100 · floor / time with its interval; None: no floor was measured with the result.

    The result stores the floor that its own device measured. The interval of that floor is the one
    of the nearest probe result of this width; overlapping launches have probes of their own.
    probed: results of such probes on this shape in the same run, µs.
    """
    floor_us = result.floor_us
    if not floor_us:
        return None
    floor = Interval(floor_us, floor_us, floor_us)
    if probed:
        nearest = min(probed, key=lambda probe: abs(math.log(probe.estimate / floor_us)))
        scale = floor_us / nearest.estimate
        floor = Interval(floor_us, nearest.low * scale, nearest.high * scale)
    ratio = ratio_interval(floor, time)
    return Interval(100 * ratio.estimate, 100 * ratio.low, 100 * ratio.high)


def shape_key(result: Result) -> tuple[object, ...]:
    """Return a key, for sorting, of results that belong together: N and K of linear layers.

    For other operations these are all parameters.
    """
    if result.operation == "linear":
        return (False, "", result.n or 0, result.k or 0, ())
    return (True, result.operation, 0, 0, natural_order(result.parameters))


def _group(result: Result) -> Any:
    key, *place = _place(result)
    return (key, result.stage, *place, result.m or 0)


def _place(result: Result) -> tuple[object, ...]:
    """Return the key of the results that share a floor. Results of protocol 1 have no regime."""
    return (shape_key(result), result.cache, result.regime or "", result.gpu)
