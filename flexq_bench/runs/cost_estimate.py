"""Estimates of measuring time, from earlier measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from flexq_bench.db.engine import Session
from flexq_bench.db.queries import case_seconds
from flexq_bench.workloads.case import Case, Stage

_MAX_MEASUREMENTS = 5  # measurements used per case: older ones are of older code


@dataclass(frozen=True, slots=True)
class CostEstimates:
    """Expected seconds: of the case itself, else the mean of its kernel and stage, else of all."""

    by_case: Mapping[str, float]
    by_kernel: Mapping[tuple[str, Stage], float]
    any_case: float | None  # None: nothing was ever measured

    def seconds(self, case: Case) -> float | None:
        """Expected seconds of measuring the case; None: nothing was ever measured."""
        known = self.by_case.get(case.key)
        return known or self.by_kernel.get((case.label, case.stage), self.any_case)

    def total(self, cases: Iterable[Case]) -> float | None:
        """Expected seconds of measuring all of them one after the other, or None."""
        each = [self.seconds(case) for case in cases]
        known = [seconds for seconds in each if seconds is not None]
        return sum(known) if known and len(known) == len(each) else None


def read_costs(session: Session, gpu: str | None = None) -> CostEstimates:
    """Read measuring times on a SKU; gpu None, or without results: on all SKUs."""
    stored = case_seconds(session, gpu)
    if not stored and gpu is not None:
        stored = case_seconds(session)
    return estimate_costs(stored)


def estimate_costs(measured: Iterable[tuple[str, float]]) -> CostEstimates:
    """Estimate costs from pairs of case key and seconds, newest first."""
    times: dict[str, list[float]] = defaultdict(list)
    for key, seconds in measured:
        if len(times[key]) < _MAX_MEASUREMENTS:
            times[key].append(seconds)
    by_case = {key: median(values) for key, values in times.items()}
    by_kernel: dict[tuple[str, Stage], list[float]] = defaultdict(list)
    for key, seconds in by_case.items():
        case = Case.from_key(key)
        by_kernel[case.label, case.stage].append(seconds)
    return CostEstimates(
        by_case,
        {kernel: fmean(values) for kernel, values in by_kernel.items()},
        fmean(by_case.values()) if by_case else None,
    )
