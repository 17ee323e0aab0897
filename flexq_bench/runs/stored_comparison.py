"""Two stored runs beside each other: what can be said without interleaving."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flexq_bench.stats import Interval, ratio_interval
from flexq_bench.stats.baseline import Result, time_of
from flexq_bench.stats.change_points import SMALLEST_LOG_RATIO
from flexq_bench.verdicts import Verdict
from workloads.case import kernel_label


class StoredResult(Result, Protocol):
    """A result that knows its case and its series."""

    @property
    def case(self) -> str: ...
    @property
    def series_id(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StoredComparison:
    """One case of two runs.

    base_us, head_us: medians with their 95 % intervals; None: wrong, never timed, or not there.
    ratio: head / base; None: one of them is missing. reason: why the verdict is what it is.
    """

    case: str
    gpu: str
    base_us: Interval | None
    head_us: Interval | None
    ratio: Interval | None
    verdict: Verdict
    reason: str


def compare_stored(
    base: Iterable[StoredResult], head: Iterable[StoredResult]
) -> list[StoredComparison]:
    """One row a case and GPU of either run, in the order of base, then what only head has.

    Results compare where they are of one series. Between two runs, what differs may be the machine:
    slower and faster need the whole interval of the ratio beyond 1 %.
    """
    first = {(r.case, r.gpu): r for r in base}
    second = {(r.case, r.gpu): r for r in head}
    return [
        _compared(key, first.get(key), second.get(key)) for key in dict.fromkeys([*first, *second])
    ]


def compare_labels(results: Iterable[StoredResult], base: str, head: str) -> list[StoredComparison]:
    """One row a case of the kernel `head` and GPU, in the order of the results.

    base, head: labels. results: one of each series, whichever run it comes from: the machine may
    differ as between two runs. A case is the same if all but the kernel is.
    """
    listed = list(results)
    bases = {_place(r): r for r in listed if kernel_label(r.kernel, r.variant) == base}
    heads = [r for r in listed if kernel_label(r.kernel, r.variant) == head]
    return [_compared((r.case, r.gpu), bases.get(_place(r)), r, one_series=False) for r in heads]


def _place(result: StoredResult) -> tuple[str, str, str, int, int, int]:
    return (result.gpu, result.stage, result.cache, result.m, result.n, result.k)


def _compared(
    key: tuple[str, str],
    base: StoredResult | None,
    head: StoredResult | None,
    *,
    one_series: bool = True,
) -> StoredComparison:
    case, gpu = key
    base_us = None if base is None else time_of(base)
    head_us = None if head is None else time_of(head)
    ratio = None
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
        ratio = ratio_interval(head_us, base_us)
        verdict, reason = _verdict(ratio), ""
    return StoredComparison(case, gpu, base_us, head_us, ratio, verdict, reason)


def _verdict(ratio: Interval) -> Verdict:
    low, high = np.log(ratio.low), np.log(ratio.high)
    if low >= SMALLEST_LOG_RATIO:
        return Verdict.SLOWER
    if high <= -SMALLEST_LOG_RATIO:
        return Verdict.FASTER
    if low > -SMALLEST_LOG_RATIO and high < SMALLEST_LOG_RATIO:
        return Verdict.SAME
    return Verdict.AMBIGUOUS
