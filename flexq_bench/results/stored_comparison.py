"""Comparison of stored results of two runs or two kernels, without interleaved measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

import numpy as np

from flexq_bench.measure.protocol import BRIEF_VERSIONS
from flexq_bench.results.stored_noise import StoredNoise
from flexq_bench.stats import Interval, ratio_interval
from flexq_bench.stats.baseline import Result, time_of
from flexq_bench.stats.log_series import SMALLEST_LOG_RATIO
from flexq_bench.stats.run_noise import with_run_noise
from flexq_bench.verdicts import Verdict
from flexq_bench.workloads.case import kernel_label


class StoredResult(Result, Protocol):
    """A result with its case, series, run, protocol version and time."""

    @property
    def case(self) -> str: ...
    @property
    def series_id(self) -> int: ...
    @property
    def run(self) -> str: ...
    @property
    def protocol_version(self) -> int: ...
    @property
    def created_at(self) -> datetime: ...


R = TypeVar("R", bound=StoredResult)


@dataclass(frozen=True, slots=True)
class StoredComparison:
    """One case of two runs.

    base_us, head_us: times with the 95 % intervals of their levels, run-to-run noise included;
    None: wrong, never timed, or missing. ratio: head / base; None: one of them is missing.
    measured: the ratio with the interval of the two measurements, without run-to-run noise.
    series: of base and head, if both were timed. reason: of the verdict.
    """

    case: str
    gpu: str
    base_us: Interval | None
    head_us: Interval | None
    ratio: Interval | None
    verdict: Verdict
    reason: str
    measured: Interval | None = None
    series: tuple[int, int] | None = None


def compare_stored(
    base: Iterable[StoredResult],
    head: Iterable[StoredResult],
    noise: StoredNoise | None = None,
) -> list[StoredComparison]:
    """Compare two runs, one row per case and GPU: those of base in its order, then those only head
    has.

    Only results of the same series are compared. The machine may have changed between the runs:
    for slower and faster the whole interval of the ratio must be beyond 1 %, run-to-run noise
    included. noise: of these series; None: intervals are of the measurements alone.
    """
    first = {(r.case, r.gpu): r for r in base}
    second = {(r.case, r.gpu): r for r in head}
    return [
        _compared(key, first.get(key), second.get(key), noise)
        for key in dict.fromkeys([*first, *second])
    ]


def compare_labels(
    results: Iterable[StoredResult],
    base: str,
    head: str,
    noise: StoredNoise | None = None,
    *,
    beside: Iterable[StoredResult] = (),
) -> list[StoredComparison]:
    """Compare two kernels, one row per GPU and case of `head`, in the order of the results.

    base, head: labels. results: one of each series, of any runs. beside: results of base in the
    same runs, which are preferred, as different runs may be of different states of the machine.
    Cases match if they differ in the kernel only.
    """
    listed = list(results)
    bases = bases_of(listed, beside, base)
    heads = [r for r in listed if kernel_label(r.kernel, r.variant) == head]
    return [_compared((r.case, r.gpu), bases(r), r, noise, one_series=False) for r in heads]


def bases_of(
    results: Iterable[R], beside: Iterable[R], baseline: str
) -> Callable[[StoredResult], R | None]:
    """Return a function that maps a result to the baseline's result to compare with; None: none.

    baseline: a label. Its result of the same run is preferred, if correct and timed; else the
    newest of `results` is used. Results of different regimes, stages, cache modes or protocols are
    never compared.
    """
    newest: dict[Place, R] = {}
    for r in results:
        if kernel_label(r.kernel, r.variant) == baseline and time_of(r) is not None:
            known = newest.get(place_of(r))
            if known is None or known.created_at < r.created_at:
                newest[place_of(r)] = r
    in_run = {
        (r.run, *place_of(r)): r
        for r in beside
        if kernel_label(r.kernel, r.variant) == baseline and time_of(r) is not None
    }
    return lambda r: in_run.get((r.run, *place_of(r))) or newest.get(place_of(r))


Place = tuple[str, str, str, str, int, str, str]


def place_of(result: StoredResult) -> Place:
    """Return the values that must be equal for the times of two kernels to be compared."""
    regime = result.regime or ""  # protocol 1 had no regimes
    path = (result.gpu, result.stage, result.cache, regime)
    return (*path, result.protocol_version, result.operation, result.parameters)


def newest_of_cases(results: Iterable[R]) -> list[R]:
    """The newest result of each kernel, GPU, shape, regime, stage and cache mode.

    Versions of the kernel and protocol are not distinguished, but a brief result counts only where
    there is no other. Results are in the given order.
    """
    newest: dict[object, R] = {}
    for r in results:
        protocol_less = (*place_of(r)[:4], *place_of(r)[5:])
        key = (kernel_label(r.kernel, r.variant), protocol_less)
        if key not in newest or _age(newest[key]) < _age(r):
            newest[key] = r
    return list(newest.values())


def _age(result: StoredResult) -> tuple[bool, datetime]:
    return result.protocol_version < BRIEF_VERSIONS, result.created_at


def _compared(
    key: tuple[str, str],
    base: StoredResult | None,
    head: StoredResult | None,
    noise: StoredNoise | None,
    *,
    one_series: bool = True,
) -> StoredComparison:
    case, gpu = key
    base_us = None if base is None else time_of(base)
    head_us = None if head is None else time_of(head)
    ratio = measured = series = None
    if base is None or head is None:
        missing = "base" if base is None else "head"
        verdict, reason = Verdict.NO_DATA, f"{missing} has no result of this case"
    elif "incorrect" in (base.status, head.status):
        verdict, reason = Verdict.INCORRECT, base.detail or head.detail
    elif one_series and base.series_id != head.series_id:
        verdict = Verdict.NO_DATA
        reason = "the two are not of one series: another kernel version or protocol"
    elif base_us is None or head_us is None:
        verdict, reason = Verdict.NO_DATA, base.detail or head.detail
    else:
        measured, series = ratio_interval(head_us, base_us), (base.series_id, head.series_id)
        ratio = measured if noise is None else level_ratio(head, base, noise)
        verdict, reason = verdict_of_ratio(ratio), ""
    if noise is not None:
        base_us = base_us and noise.time(_series(base), base_us)
        head_us = head_us and noise.time(_series(head), head_us)
    return StoredComparison(case, gpu, base_us, head_us, ratio, verdict, reason, measured, series)


def level_ratio(top: StoredResult, bottom: StoredResult, noise: StoredNoise) -> Interval:
    """top / bottom with the 95 % interval of the ratio of their levels.

    Within one run the noise of such ratios is included, between two runs the noise of both series.
    Raises ValueError if one of them was never timed.
    """
    over, under = time_of(top), time_of(bottom)
    if over is None or under is None:
        raise ValueError("a ratio needs two times")
    if top.run == bottom.run:
        shared = noise.of_ratio(top.series_id, bottom.series_id)
        return with_run_noise(ratio_interval(over, under), shared)
    sides = ((top.series_id, over), (bottom.series_id, under))
    levels = [noise.time(series, time, apart=True) for series, time in sides]
    return ratio_interval(*levels)


def _series(result: StoredResult | None) -> int:
    return -1 if result is None else result.series_id


def verdict_of_ratio(ratio: Interval) -> Verdict:
    """Slower or faster if the whole interval is beyond 1 %, same if all of it is within."""
    low, high = np.log(ratio.low), np.log(ratio.high)
    if low >= SMALLEST_LOG_RATIO:
        return Verdict.SLOWER
    if high <= -SMALLEST_LOG_RATIO:
        return Verdict.FASTER
    if low > -SMALLEST_LOG_RATIO and high < SMALLEST_LOG_RATIO:
        return Verdict.SAME
    return Verdict.AMBIGUOUS
