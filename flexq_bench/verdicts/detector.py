"""From evidence to verdicts: the alert rule applied to one comparison, and to many together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flexq_bench.stats.baseline import BASELINE
from flexq_bench.verdicts import alert_rule
from flexq_bench.verdicts.case_comparison import CaseComparison
from flexq_bench.verdicts.confirmation import Confirmation, confirm, confirm_together
from flexq_bench.verdicts.evidence import Evidence
from flexq_bench.verdicts.verdict import Cause, Verdict
from flexq_bench.workloads.case import Case, parse_kernel_label
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.probes import floor_kernel, is_probe


@dataclass(frozen=True, slots=True)
class Judged:
    """A case of two commits with its verdict and evidence."""

    compared: CaseComparison
    evidence: Evidence
    confirmation: Confirmation

    @property
    def case(self) -> Case:
        return self.compared.case

    @property
    def is_canary(self) -> bool:
        """True if a commit was compared with itself."""
        return self.compared.base == self.compared.head

    @property
    def is_worse(self) -> bool:
        """True if the code made the kernel slower or incorrect."""
        confirmed = self.confirmation
        return alert_rule.is_worse(confirmed.verdict, confirmed.cause, self.case.kernel)


def judge_evidence(evidence: Evidence) -> Confirmation:
    """The verdict on evidence; repeating it gives the same result.

    The comparison is judged alone (`confirm`). If it changed, the floor and the baseline kernel
    determine the cause (`alert_rule.attribute`). Finally it is judged together with the other
    comparisons of its night (`confirm_together`). Raises ValueError if the comparison's lengths
    differ.
    """
    confirmation = confirm(evidence.comparison)
    if evidence.detail and confirmation.verdict in (Verdict.NO_DATA, Verdict.INCORRECT):
        confirmation = replace(confirmation, reason=evidence.detail)
    anchored = evidence.floor is not None or evidence.baseline is not None
    if confirmation.cause is Cause.CODE and anchored:
        cause = alert_rule.attribute(
            confirmation.log_ratio, floor=evidence.floor, baseline=evidence.baseline
        )
        confirmation = replace(
            confirmation,
            cause=cause,
            reason=confirmation.reason + _anchors(evidence, confirmation, cause),
        )
    judged_with = (replace(confirmation, p_value=p_value) for p_value in evidence.beside)
    return confirm_together((confirmation, *judged_with), rate=alert_rule.RATE_OF_ONE_LOOK)[0]


def judge_together(
    comparisons: Sequence[CaseComparison],
    *,
    noise_floors: Sequence[float],
    weight_bits: Sequence[int],
) -> list[Judged]:
    """The verdicts on comparisons that are judged together, in the order given.

    noise_floors: ln, of each comparison's series, from its own A/A runs; 0: unknown. weight_bits:
    of each one's kernel. Canaries, which compare a commit with itself, are judged separately from
    the others.
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


def _is_canary(compared: CaseComparison) -> bool:
    return compared.base == compared.head


def _changes(
    comparisons: Sequence[CaseComparison], alone: Sequence[Confirmation]
) -> Mapping[tuple[str, str, str], float]:
    """ln(head / base) by base, head and case; 0 if it is not significant.

    An anchor that differs by chance must not excuse a kernel that the code made slower.
    """
    return {
        (compared.base, compared.head, compared.case.key): (
            confirmed.log_ratio if confirmed.low > 0 or confirmed.high < 0 else 0.0
        )
        for compared, confirmed in zip(comparisons, alone, strict=True)
        if math.isfinite(confirmed.log_ratio)
    }


def _anchors_of(
    compared: CaseComparison, weight_bits: int, changes: Mapping[tuple[str, str, str], float]
) -> tuple[float | None, float | None]:
    """Changes of the floor and of the baseline kernel between the same commits, at this shape."""
    case = compared.case
    if is_probe(case.kernel) or not isinstance(case.workload, GemmWorkload):
        return None, None
    baseline = replace(case, kernel=BASELINE, variant="")
    commits = (compared.base, compared.head)
    floors = []
    for overlaps in (True, False):  # the floor of our kernels first
        kernel, variant = parse_kernel_label(floor_kernel(weight_bits, overlaps=overlaps))
        gemm = replace(case.workload, m=1)
        floors.append(Case(kernel, gemm, variant=variant, cache=case.cache, regime=case.regime))
    known = (changes.get((*commits, floor.key)) for floor in floors)
    return (
        next((change for change in known if change is not None), None),
        None if baseline.key == case.key else changes.get((*commits, baseline.key)),
    )


def _anchors(evidence: Evidence, confirmation: Confirmation, cause: Cause) -> str:
    """Describe the changes of the anchors, and the change that they leave to the code."""
    anchors = (("floor", evidence.floor), (BASELINE, evidence.baseline))
    known = [(name, change) for name, change in anchors if change is not None]
    anchors_changed = ", ".join(
        f"{name} {_percent(change) if change else 'unchanged'}" for name, change in known
    )
    if cause is Cause.BOTH:
        machine = sum(change for _, change in known) / len(known)
        left = _percent(confirmation.log_ratio - machine)
        return f"; in the same comparison {anchors_changed}: {left} remains for the code"
    conclusion = {
        Cause.CODE: "caused by the code",
        Cause.ENVIRONMENT: "caused by the machine",
        Cause.UNCLEAR: "caused by the code or the machine",
    }[cause]
    return f"; in the same comparison {anchors_changed}: {conclusion}"


def _percent(log_ratio: float) -> str:
    return f"{math.expm1(log_ratio):+.2%}"
