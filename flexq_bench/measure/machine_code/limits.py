"""What a difference between two revisions' machine code means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from flexq_bench.measure.machine_code.metrics import (
    INSTRUCTIONS,
    LOCAL_BYTES,
    SPILL_BYTES,
    WARPS_PER_SM,
    Metric,
)

Verdict = Literal["worse", "better", "changed"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a change may cost, in percent of the base.

    occupancy_loss: of the warps that an SM holds; 0: none may be lost. instruction_growth: of each
    kind of instruction; None: it is reported, and never a regression.
    """

    occupancy_loss: float = 0.0
    instruction_growth: float | None = None


@dataclass(frozen=True, slots=True)
class Function:
    """One function of one build on one target."""

    build: str
    target: str
    name: str


@dataclass(frozen=True, slots=True)
class Change:
    """One metric that differs. base None: the base has no such function."""

    function: Function
    metric: Metric
    base: float | None
    head: float
    verdict: Verdict

    @property
    def relative(self) -> float | None:
        """(head - base) / base; None: there is no base, or it is zero."""
        return (self.head - self.base) / self.base if self.base else None


Values = Mapping[Metric, float]


def changed_metrics(
    base: Values | None, head: Values, function: Function, limits: Limits
) -> list[Change]:
    """The metrics of a function that differ. base None: it is new, so only a spill counts.

    More bytes spilled are worse, and so are fewer warps an SM, as far as `limits` go. Registers and
    shared memory are worse by the warps that they cost, and otherwise merely changed.
    """
    if base is None:
        new = ((m, None, head[m]) for m in (SPILL_BYTES, LOCAL_BYTES) if head.get(m))
        return [Change(function, *item, "worse") for item in new]
    both = ((m, base[m], head[m]) for m in head if m in base and head[m] != base[m])
    return [
        Change(function, metric, before, after, _verdict(metric, before, after, limits))
        for metric, before, after in both
    ]


def is_regression(changes: Iterable[Change]) -> bool:
    """Whether any of them is worse."""
    return any(change.verdict == "worse" for change in changes)


def _verdict(metric: Metric, base: float, head: float, limits: Limits) -> Verdict:
    if metric in (SPILL_BYTES, LOCAL_BYTES):
        return "worse" if head > base else "better"
    if metric == WARPS_PER_SM:
        if head > base:
            return "better"
        # Where not even one block fits any more, no limit allows it.
        return (
            "worse" if head == 0 or head < base * (1 - limits.occupancy_loss / 100) else "changed"
        )
    growth = limits.instruction_growth
    if metric in INSTRUCTIONS and growth is not None and head > base * (1 + growth / 100):
        return "worse"
    return "changed"
