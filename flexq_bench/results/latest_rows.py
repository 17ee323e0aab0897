"""The newest result of each kernel on each shape, with its level and ratios."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from flexq_bench.results.stored_comparison import (
    StoredResult,
    bases_of,
    level_ratio,
    newest_of_cases,
)
from flexq_bench.results.stored_noise import StoredNoise
from flexq_bench.stats import Interval
from flexq_bench.stats.baseline import floor_share, shape_key, time_of
from flexq_bench.stats.run_noise import with_run_noise
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.probes import floor_kernel, is_probe

R = TypeVar("R", bound=StoredResult)


@dataclass(frozen=True, slots=True)
class LatestRow(Generic[R]):
    """A result with 95 % intervals of its level and ratios; None: never timed, or no such ratio.

    level_us: of the time, including run-to-run noise. pct_of_floor: 100 · floor / time.
    speedup: baseline / kernel. base: the baseline's result in that ratio. noise: source of the
    estimate of the series' noise.
    """

    result: R
    level_us: Interval | None
    pct_of_floor: Interval | None
    speedup: Interval | None
    base: R | None
    noise: str

    @property
    def in_one_run(self) -> bool:
        """True if one run measured both the result and its baseline."""
        return self.base is not None and self.base.run == self.result.run


def latest_rows(
    results: Iterable[R], beside: Sequence[R], baseline: str, noise: StoredNoise
) -> list[LatestRow[R]]:
    """One row per kernel and shape, sorted by shape, stage, cache and M.

    results: one of each series; only the newest version of a kernel is used, and no probes.
    beside: results of the baseline and of the read floors in the same runs, which are preferred in
    ratios. baseline: a kernel's label.
    """
    newest = [r for r in newest_of_cases(results) if not is_probe(r.kernel)]
    base_of = bases_of(newest, beside, baseline)
    floors: defaultdict[object, list[Interval]] = defaultdict(list)
    for probe in beside:
        time = time_of(probe)
        if is_probe(probe.kernel) and time is not None:
            floors[_floor_key(probe, probe.kernel)].append(time)
    ordered = sorted(
        newest, key=lambda r: (shape_key(r), r.stage, r.cache, r.regime or "", r.m or 0)
    )

    def row(result: R) -> LatestRow[R]:
        time, source = time_of(result), noise.source(result.series_id)
        if time is None:
            return LatestRow(result, None, None, None, None, source)
        base = base_of(result)
        is_base = kernel_label(result.kernel, result.variant) == baseline
        speedup = None if base is None else level_ratio(base, result, noise)
        probed = floors[_floor_key(result, floor_kernel(result.weight_bits))]
        share = floor_share(result, time, probed)
        return LatestRow(
            result,
            noise.time(result.series_id, time),
            share and with_run_noise(share, noise.of_floor_share(result.series_id)),
            Interval(1.0, 1.0, 1.0) if is_base else speedup,
            result if is_base else base,
            source,
        )

    return [row(result) for result in ordered]


def _floor_key(result: StoredResult, kernel: str) -> object:
    place = (result.run, result.gpu, result.cache, result.regime or "", kernel)
    return (*place, shape_key(result))
