"""Metrics of a compiled function that differ between two revisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexq_bench.measure.machine_code.metrics import LOCAL_BYTES, SPILL_BYTES, Metric

Values = Mapping[Metric, float]


@dataclass(frozen=True, slots=True)
class Function:
    """One function of one build on one target."""

    build: str
    target: str
    name: str


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric that differs. base None: the base has no such function."""

    function: Function
    metric: Metric
    base: float | None
    head: float


def changed_metrics(base: Values | None, head: Values, function: Function) -> list[Difference]:
    """The metrics of a function that differ. base None: it is new, so only a spill counts."""
    if base is None:
        spills = ((metric, head.get(metric)) for metric in (SPILL_BYTES, LOCAL_BYTES))
        return [Difference(function, metric, None, value) for metric, value in spills if value]
    return [
        Difference(function, metric, base[metric], value)
        for metric, value in head.items()
        if metric in base and value != base[metric]
    ]
