"""The rule that turns evidence into a verdict, with its name, version and parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flexq_bench.stats.baseline import BASELINE
from flexq_bench.verdicts.anchors import attribute
from flexq_bench.verdicts.compared import Compared
from flexq_bench.verdicts.confirmation import (
    CLOCK_TOLERANCE,
    CONFIDENCE,
    FALSE_DISCOVERY_RATE,
    FEWEST_BLOCKS,
    FEWEST_PLACEMENTS,
    LOOKS,
    SMALLEST_CHANGE,
    Confirmation,
    confirm,
    confirm_together,
)
from flexq_bench.verdicts.evidence import Evidence
from flexq_bench.verdicts.verdict import Cause, Verdict
from workloads.case import Case
from workloads.probes import calibrates, floor_kernel, is_probe

NAME = "interleaved"
# Raise it with every change that can give the same evidence another verdict.
VERSION = 2
RATE = FALSE_DISCOVERY_RATE / LOOKS
PARAMETERS: dict[str, Any] = {
    "confidence": CONFIDENCE,
    "smallest_change": SMALLEST_CHANGE,
    "false_discovery_rate": RATE,
    "clock_tolerance": CLOCK_TOLERANCE,
    "fewest_blocks": FEWEST_BLOCKS,
    "fewest_placements": FEWEST_PLACEMENTS,
}

_Place = tuple[str, int, int, str]


@dataclass(frozen=True, slots=True)
class Judged:
    """A case of two commits with its verdict, and what the verdict rests on."""

    compared: Compared
    evidence: Evidence
    confirmation: Confirmation

    @property
    def case(self) -> Case:
        return self.compared.case

    @property
    def is_canary(self) -> bool:
        """Whether a commit was compared with itself."""
        return self.compared.base == self.compared.head

    @property
    def is_worse(self) -> bool:
        """Whether the code made it slower or wrong. A slow machine is not the code's doing, and a
        slower read floor says something of the others."""
        found = self.confirmation
        if found.verdict is Verdict.INCORRECT:
            return True
        slower = found.verdict is Verdict.SLOWER and not calibrates(self.case.kernel)
        return slower and found.cause is not Cause.ENVIRONMENT


def judge_evidence(evidence: Evidence) -> Confirmation:
    """The verdict on evidence, the same whenever it is computed.

    The comparison by itself (`confirm`); where it changed, what the floor and the baseline kernel
    say about the cause (`attribute`); then beside the other comparisons of its night
    (`confirm_together`). Raises ValueError if the comparison's lengths differ.
    """
    found = confirm(evidence.comparison)
    if evidence.detail and found.verdict in (Verdict.NO_DATA, Verdict.INCORRECT):
        found = replace(found, reason=evidence.detail)
    anchored = evidence.floor is not None or evidence.baseline is not None
    if found.cause is Cause.CODE and anchored:
        cause = attribute(found.log_ratio, floor=evidence.floor, baseline=evidence.baseline)
        found = replace(found, cause=cause, reason=found.reason + _anchors(evidence, found, cause))
    others = (replace(found, p_value=p_value) for p_value in evidence.beside)
    return confirm_together((found, *others), rate=RATE)[0]


def judge_together(
    comparisons: Sequence[Compared],
    *,
    noise_floors: Sequence[float],
    weight_bits: Sequence[int],
) -> list[Judged]:
    """The verdicts on all comparisons of one night, in the order given.

    noise_floors: ln, of each comparison's series, by its own A/A runs; 0: unknown. weight_bits: of
    each one's kernel. Canaries, which compare a commit with itself, are judged among themselves.
    """
    inputs = [
        replace(compared.comparison, noise_floor=max(floor, compared.comparison.noise_floor))
        for compared, floor in zip(comparisons, noise_floors, strict=True)
    ]
    alone = [confirm(comparison) for comparison in inputs]
    changes = _changes(comparisons, alone)
    judged = []
    for i, (compared, bits) in enumerate(zip(comparisons, weight_bits, strict=True)):
        floor, baseline = _anchors_of(compared, bits, changes)
        evidence = Evidence(
            case=compared.case.key,
            comparison=inputs[i],
            beside=tuple(
                other.p_value
                for j, other in enumerate(alone)
                if j != i
                and math.isfinite(other.p_value)
                and _is_canary(comparisons[j]) == _is_canary(compared)
            ),
            floor=floor,
            baseline=baseline,
            detail=compared.detail,
            base_binary=compared.base_binary,
            head_binary=compared.head_binary,
            base_config=compared.base_config,
            head_config=compared.head_config,
        )
        judged.append(Judged(compared, evidence, judge_evidence(evidence)))
    return judged


def _is_canary(compared: Compared) -> bool:
    return compared.base == compared.head


def _changes(
    comparisons: Sequence[Compared], alone: Sequence[Confirmation]
) -> Mapping[tuple[str, str, str], float]:
    """ln(head / base) by base, head and case; 0 where it may as well be none.

    An anchor that differs by chance must not clear a kernel that the code made slower.
    """
    return {
        (compared.base, compared.head, compared.case.key): (
            found.log_ratio if found.low > 0 or found.high < 0 else 0.0
        )
        for compared, found in zip(comparisons, alone, strict=True)
        if math.isfinite(found.log_ratio)
    }


def _anchors_of(
    compared: Compared, weight_bits: int, changes: Mapping[tuple[str, str, str], float]
) -> tuple[float | None, float | None]:
    """Changes of the floor and of the baseline kernel between the same commits, at this shape."""
    case = compared.case
    if is_probe(case.kernel):
        return None, None
    floor = Case(floor_kernel(weight_bits), replace(case.gemm, m=1), cache=case.cache)
    baseline = replace(case, kernel=BASELINE, variant="")
    commits = (compared.base, compared.head)
    return (
        changes.get((*commits, floor.key)),
        None if baseline.key == case.key else changes.get((*commits, baseline.key)),
    )


def _anchors(evidence: Evidence, found: Confirmation, cause: Cause) -> str:
    """What changed beside the kernel, and what that leaves to the code."""
    anchors = (("the floor", evidence.floor), (BASELINE, evidence.baseline))
    told = [(name, change) for name, change in anchors if change is not None]
    beside = " and ".join(
        f"{name} {_percent(change) if change else 'stayed'}" for name, change in told
    )
    if cause is Cause.BOTH:
        machine = sum(change for _, change in told) / len(told)
        return f"; beside it {beside}: {_percent(found.log_ratio - machine)} is left to the code"
    conclusion = {
        Cause.CODE: "the code did it",
        Cause.ENVIRONMENT: "the machine did it",
        Cause.UNCLEAR: "the code or the machine did it",
    }[cause]
    return f"; beside it {beside}: {conclusion}"


def _percent(log_ratio: float) -> str:
    return f"{math.expm1(log_ratio):+.2%}"
