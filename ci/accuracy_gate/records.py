"""Database records of an accuracy gate's decisions: one for each scheme."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from flexq_bench.accuracy.records import ResultOrigin
from flexq_bench.ci.accuracy_gate.gate import AccuracyReport
from flexq_bench.ci.accuracy_gate.limits import LimitOutcome, deciding
from flexq_bench.ci.accuracy_gate.policy import AccuracyPolicy
from flexq_bench.ci.gate_perf import Outcome, exit_code_of
from flexq_bench.db.identity import name_uuid
from flexq_bench.db.records import GateLimit, GateRecord


def gate_records(
    report: AccuracyReport, policy: AccuracyPolicy, origin: ResultOrigin, *, at: datetime
) -> list[GateRecord]:
    """Return a record for each judged scheme, in order. at: time-zone aware."""
    schemes = dict.fromkeys(one.scheme for one in report.judged)
    return [
        _record(scheme, [one for one in report.judged if one.scheme == scheme],
                report, policy, origin, at)
        for scheme in schemes
    ]  # fmt: skip


def _record(
    scheme: str,
    judged: Sequence[LimitOutcome],
    report: AccuracyReport,
    policy: AccuracyPolicy,
    origin: ResultOrigin,
    at: datetime,
) -> GateRecord:
    outcomes = set(deciding(judged))
    identity = (origin.run.uuid, policy.fingerprint, report.base, scheme, at.isoformat())
    return GateRecord(
        uuid=name_uuid(" ".join(identity), kind="accuracy gate"),
        model=report.model,
        model_hash=report.model_hash,
        scheme=scheme,
        base=report.base,
        policy=policy.name,
        policy_version=policy.version,
        policy_hash=policy.fingerprint,
        content_hash=report.content_hashes.get(scheme),
        through=report.through,
        reference=report.reference or None,
        reference_hash=report.reference_hash,
        diagnosis=next((one.values() for one in report.diagnoses if one.scheme == scheme), None),
        verdict=next(outcome for outcome in Outcome if outcome in outcomes).value,
        exit_code=int(exit_code_of(outcomes)),
        limits=tuple(_limit(one) for one in judged),
        created_at=at.isoformat(),
        run=origin.run,
        commit=origin.commit,
        device=origin.device,
        environment=origin.environment,
    )


def _limit(one: LimitOutcome) -> GateLimit:
    return GateLimit(
        check=one.check,
        limit=one.limit,
        outcome=one.outcome.value,
        reason=one.reason,
        base=one.base,
        value=one.value,
        change=one.change,
        low=one.low,
        high=one.high,
        unit=one.unit,
        detectable=one.detectable,
    )
