"""Findings as the records that are stored, and back; and going through a plan with both."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from db import queries
from db.accuracy_records import AccuracyRecord
from db.accuracy_store import add_accuracy
from db.engine import Database
from db.errors import DatabaseError
from db.records import CommitInfo, DeviceInfo, RunInfo
from db.store import begin_run, finish_run
from flexq_bench.accuracy.evaluating import Evaluator
from flexq_bench.accuracy.findings import Direction, Finding
from flexq_bench.accuracy.tasks import task_name

SUITE = "accuracy"
Unit = tuple[str, str]  # scheme and task
OnUnit = Callable[[Unit, Sequence[Finding]], None]
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "flexq-bench accuracy")
_OBSERVED = "observed"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where findings come from: what every record of a run has in common."""

    model: str
    model_hash: str
    seed: int
    run: RunInfo
    commit: CommitInfo
    device: DeviceInfo
    environment: dict[str, str]


def execute(
    database: Database,
    evaluator: Evaluator,
    units: Sequence[Unit],
    origin: Origin,
    *,
    on_unit: OnUnit,
) -> list[Finding]:
    """Evaluate the units in order and store each one's findings as they come; all of them.

    Units whose findings the run has already, with the same parameters, are not evaluated again.
    On an error and on KeyboardInterrupt what was stored stays, and the run is marked failed or
    interrupted.
    """
    with database.session() as session:
        run = begin_run(session, origin.run, origin.commit)
        stored = list(queries.accuracy_results(session, runs=[run.uuid]))
    done = _finished(stored, origin)
    found: list[Finding] = []
    try:
        for unit in units:
            stored_before = done.get((unit[0], task_name(unit[1])), ())
            findings = _reusable(stored_before, evaluator.parameters(*unit))
            if not findings:
                findings = evaluator.evaluate(*unit)
                records = [build_record(finding, origin) for finding in findings]
                with database.session() as session:
                    add_accuracy(session, records)
            found += findings
            on_unit(unit, findings)
    except KeyboardInterrupt:
        _finish(database, run, "interrupted")
        raise
    except Exception:
        _finish(database, run, "failed")
        raise
    failed = any(finding.value is None for finding in found)
    _finish(database, run, "failed" if failed else "complete")
    return found


def build_record(finding: Finding, origin: Origin) -> AccuracyRecord:
    """The record of a finding, made now."""
    identity = f"{origin.run.uuid} {finding.scheme} {finding.task} {finding.metric}"
    return AccuracyRecord(
        uuid=str(uuid.uuid5(_NAMESPACE, identity)),
        model=origin.model,
        model_hash=origin.model_hash,
        scheme=finding.scheme,
        task=finding.task,
        task_version=finding.task_version,
        data_hash=finding.data_hash,
        metric=finding.metric,
        direction=finding.direction,
        status="failed" if finding.value is None else "ok",
        detail=finding.detail,
        value=finding.value,
        standard_error=finding.standard_error,
        n_items=finding.n_items,
        values=finding.values,
        seed=origin.seed,
        parameters={**finding.parameters, _OBSERVED: dict(finding.observed)},
        created_at=datetime.now(UTC).isoformat(),
        run=origin.run,
        commit=origin.commit,
        device=origin.device,
        environment=origin.environment,
    )


def finding_of(record: AccuracyRecord) -> Finding:
    """The finding that a record was made of."""
    parameters = dict(record.parameters)
    observed = parameters.pop(_OBSERVED, {})
    return Finding(
        scheme=record.scheme,
        task=record.task,
        task_version=record.task_version,
        data_hash=record.data_hash,
        metric=record.metric,
        direction=cast(Direction, record.direction),
        value=record.value,
        standard_error=record.standard_error,
        n_items=record.n_items,
        values=record.values,
        parameters=parameters,
        detail=record.detail,
        observed=observed,
    )


def _finished(
    records: Sequence[AccuracyRecord], origin: Origin
) -> Mapping[Unit, list[AccuracyRecord]]:
    """The units that are stored whole of this very model, commit and seed."""
    units: dict[Unit, list[AccuracyRecord]] = {}
    for record in records:
        same = (record.model_hash, record.seed, record.commit.sha, record.commit.dirty)
        if same == (origin.model_hash, origin.seed, origin.commit.sha, origin.commit.dirty):
            units.setdefault((record.scheme, record.task), []).append(record)
    return {unit: rows for unit, rows in units.items() if all(row.status == "ok" for row in rows)}


def _reusable(records: Sequence[AccuracyRecord], parameters: Mapping[str, Any]) -> list[Finding]:
    """The findings, if all of them were made with these parameters."""
    wanted = json.loads(json.dumps(parameters))
    findings = [finding_of(record) for record in records]
    same = all(
        {name: finding.parameters.get(name) for name in wanted} == wanted for finding in findings
    )
    return findings if same else []


def _finish(database: Database, run: RunInfo, status: str) -> None:
    try:
        with database.session() as session:
            finish_run(session, run.uuid, status)
    except DatabaseError as error:
        # The results are stored one by one before this; only the label is lost.
        log.warning("run %s could not be marked %s: %s", run.uuid, status, error)
