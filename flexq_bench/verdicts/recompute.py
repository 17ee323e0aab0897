"""Recomputation of stored verdicts from their evidence, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flexq_bench.db import queries
from flexq_bench.db.engine import Session
from flexq_bench.db.errors import NotFoundError
from flexq_bench.db.identity import fingerprint
from flexq_bench.db.queries import DecisionRow
from flexq_bench.verdicts import alert_rule, history_verdict
from flexq_bench.verdicts.confirmation import Confirmation
from flexq_bench.verdicts.detector import judge_evidence
from flexq_bench.verdicts.evidence import Evidence
from flexq_bench.verdicts.nightly import finite


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A stored decision and its recomputation.

    evidence, confirmation None: not available, or judged by history alone. differences: one line
    per disagreement; empty: all values agree to the last bit.
    """

    decision: DecisionRow
    evidence: Evidence | None
    confirmation: Confirmation | None
    differences: tuple[str, ...]


def recompute(session: Session, alert_id: int) -> list[Recomputed]:
    """Recompute the decisions of an alert, slowest first. Raises NotFoundError: no such alert."""
    queries.alert_by_id(session, alert_id)
    decisions = queries.alert_decisions(session, alert_id)
    return [recompute_decision(session, row) for row in decisions]


def recompute_decision(session: Session, row: DecisionRow) -> Recomputed:
    """Recompute one decision from its evidence."""
    try:
        flat = queries.decision_evidence(session, row.uuid)
    except NotFoundError:
        return Recomputed(row, None, None, ("its evidence is gone",))
    if (row.detector, row.detector_version) == (
        history_verdict.DETECTOR,
        history_verdict.DETECTOR_VERSION,
    ):
        return Recomputed(row, None, None, tuple(_history_differences(row, flat)))
    if (row.detector, row.detector_version) != (alert_rule.DETECTOR, alert_rule.DETECTOR_VERSION):
        stored = f"{row.detector} {row.detector_version}"
        ours = f"{alert_rule.DETECTOR} {alert_rule.DETECTOR_VERSION}"
        return Recomputed(
            row, None, None, (f"{stored} decided, this version has {ours}: use that version",)
        )
    differences = _of_inputs(row, flat, alert_rule.PARAMETERS)
    try:
        evidence = Evidence.from_dict(flat)
        confirmation = judge_evidence(evidence)
    except (KeyError, TypeError, ValueError) as error:
        return Recomputed(row, None, None, (*differences, f"its evidence can't be read: {error}"))
    pairs: tuple[tuple[str, object, object], ...] = (
        ("verdict", row.verdict, confirmation.verdict.value),
        ("cause", row.cause, confirmation.cause.value),
        ("reason", row.reason, confirmation.reason),
        ("log_ratio", row.log_ratio, finite(confirmation.log_ratio)),
        ("log_ratio_low", row.log_ratio_low, finite(confirmation.low)),
        ("log_ratio_high", row.log_ratio_high, finite(confirmation.high)),
    )
    differences += _of_pairs(pairs)
    return Recomputed(row, evidence, confirmation, tuple(differences))


def _history_differences(row: DecisionRow, flat: Mapping[str, Any]) -> list[str]:
    differences = _of_inputs(row, flat, history_verdict.PARAMETERS)
    try:
        step = history_verdict.judged_again(flat)
    except (KeyError, TypeError, ValueError) as error:
        return [*differences, f"its evidence can't be read: {error}"]
    if step is None:
        return [*differences, "its history has no change of level there"]
    pairs: tuple[tuple[str, object, object], ...] = (
        ("verdict", row.verdict, step.verdict.value),
        ("cause", row.cause, step.cause.value),
        ("reason", row.reason, step.reason),
        ("log_ratio", row.log_ratio, step.log_ratio),
    )
    return differences + _of_pairs(pairs)


def _of_inputs(
    row: DecisionRow, flat: Mapping[str, Any], parameters: Mapping[str, Any]
) -> list[str]:
    differences = []
    if fingerprint(flat) != row.input_hash:
        differences.append("its evidence is not what was judged: the input hash differs")
    return differences + [
        f"{name} was {row.parameters.get(name)}, this version has {value}"
        for name, value in parameters.items()
        if row.parameters.get(name) != value
    ]


def _of_pairs(pairs: Iterable[tuple[str, object, object]]) -> list[str]:
    return [
        f"{name} was {stored!r}, is {now!r} when computed again"
        for name, stored, now in pairs
        if stored != now
    ]
