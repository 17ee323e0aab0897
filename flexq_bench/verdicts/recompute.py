"""Stored verdicts: shown as they were decided, and recomputed from their evidence by today's rules.

A stored verdict needs no code to be explained: its rule, numbers and words are stored with its
evidence, and a hash proves that nothing changed since. What the rules of this version say of the
same evidence is a second answer, which may differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from flexq_bench.db import queries
from flexq_bench.db.decisions import decided_hash
from flexq_bench.db.engine import Session
from flexq_bench.db.errors import NotFoundError
from flexq_bench.db.identity import fingerprint
from flexq_bench.db.queries import DecisionRow
from flexq_bench.verdicts import alert_rule, history_verdict
from flexq_bench.verdicts.confirmation import Confirmation
from flexq_bench.verdicts.detector import judge_evidence
from flexq_bench.verdicts.evidence import Evidence
from flexq_bench.verdicts.nightly import finite
from flexq_bench.verdicts.verdict import Cause, Verdict


@dataclass(frozen=True, slots=True)
class Again:
    """Answer of the rules of this version to the stored evidence.

    rules: the detector and its version. verdict None: these rules find nothing, see the reason.
    differences: from the stored verdict, one line each; empty: it is the same to the last bit.
    """

    rules: str
    verdict: str | None
    reason: str
    log_ratio: float | None
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explained:
    """A stored verdict with its evidence.

    problem: why it can't be trusted; empty: nothing changed since it was decided. raw: the evidence
    as stored; None: it is gone. evidence: of an interleaved comparison; None: of a history, or this
    version can't read it. again None: this version has no rules for such evidence.
    """

    decision: DecisionRow
    problem: str
    raw: Mapping[str, Any] | None
    evidence: Evidence | None
    again: Again | None

    @property
    def conclusion(self) -> Confirmation:
        """The stored verdict with its numbers; those that were not stored are NaN or 0."""
        row, numbers = self.decision, self.decision.numbers or {}
        smallest = numbers.get("smallest_change", row.parameters.get("smallest_change"))
        return Confirmation(
            # Text of any version, which is only displayed.
            cast(Verdict, row.verdict),
            cast(Cause, row.cause),
            row.reason,
            log_ratio=_number(row.log_ratio),
            low=_number(row.log_ratio_low),
            high=_number(row.log_ratio_high),
            p_value=_number(numbers.get("p_value")),
            smallest_change=_number(smallest),
            blocks=int(numbers.get("blocks") or 0),
            placements=int(numbers.get("placements") or 0),
        )


def explain_alert(session: Session, alert_id: int) -> list[Explained]:
    """Return the verdicts of an alert, slowest first. Raises NotFoundError: no such alert."""
    queries.alert_by_id(session, alert_id)
    decisions = queries.alert_decisions(session, alert_id)
    return [explain_decision(session, row) for row in decisions]


def explain_decision(session: Session, row: DecisionRow) -> Explained:
    """Return a verdict with its evidence, and what today's rules say of it."""
    try:
        raw = queries.decision_evidence(session, row.uuid)
    except NotFoundError:
        return Explained(row, "its evidence is gone", None, None, None)
    problem = ""
    if fingerprint(raw) != row.input_hash:
        problem = "its evidence is not what was judged: the hash differs"
    elif row.decided_hash not in (None, decided_hash(_columns(row))):
        problem = "it is not what was decided: the hash differs"
    evidence = None
    if row.detector == alert_rule.DETECTOR:
        try:
            evidence = Evidence.from_dict(raw)
        except (KeyError, TypeError, ValueError):
            return Explained(row, problem, raw, None, None)
    return Explained(row, problem, raw, evidence, _again(row, raw, evidence))


def _again(row: DecisionRow, raw: Mapping[str, Any], evidence: Evidence | None) -> Again | None:
    try:
        if evidence is not None:
            values = _of_comparison(evidence)
            name, version = alert_rule.DETECTOR, alert_rule.DETECTOR_VERSION
            parameters = alert_rule.PARAMETERS
        elif row.detector == history_verdict.DETECTOR:
            values = _of_history(raw)
            name, version = history_verdict.DETECTOR, history_verdict.DETECTOR_VERSION
            parameters = history_verdict.PARAMETERS
        else:
            return None
    except (KeyError, TypeError, ValueError):
        return None
    differences = [
        f"{key} was {row.parameters.get(key)}, this version has {value}"
        for key, value in parameters.items()
        if row.parameters.get(key) != value
    ]
    differences += [
        f"{key} was {getattr(row, key)!r}, is {value!r} by today's rules"
        for key, value in values.items()
        if getattr(row, key) != value
    ]
    return Again(
        f"{name} {version}",
        values["verdict"],
        values["reason"],
        values["log_ratio"],
        tuple(differences),
    )


def _of_comparison(evidence: Evidence) -> dict[str, Any]:
    judged = judge_evidence(evidence)
    return {
        "verdict": judged.verdict.value,
        "cause": judged.cause.value,
        "reason": judged.reason,
        "log_ratio": finite(judged.log_ratio),
        "log_ratio_low": finite(judged.low),
        "log_ratio_high": finite(judged.high),
    }


def _of_history(raw: Mapping[str, Any]) -> dict[str, Any]:
    step = history_verdict.judged_again(raw)
    if step is None:
        nothing = "there is no change of level here"
        return {"verdict": None, "reason": nothing, "log_ratio": None}
    return {
        "verdict": step.verdict.value,
        "cause": step.cause.value,
        "reason": step.reason,
        "log_ratio": step.log_ratio,
    }


def _columns(row: DecisionRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in DecisionRow.__slots__}


def _number(value: float | None) -> float:
    return math.nan if value is None else value
