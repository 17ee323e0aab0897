"""Conversion of results to stored records and back, and execution of a plan with storage."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from flexq_bench.accuracy.evaluator import Evaluator
from flexq_bench.accuracy.results import FULL_PRECISION, ORIGINAL, Direction, MetricResult
from flexq_bench.accuracy.tasks import task_name
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.identity import name_uuid
from flexq_bench.db.queries import Filters
from flexq_bench.db.records import AccuracyRecord, CommitInfo, DeviceInfo, RunInfo
from flexq_bench.db.store import add_records
from flexq_bench.errors import UsageError
from flexq_bench.runs.lifecycle import OpenRun, open_run

Unit = tuple[str, str]  # scheme and task
OnUnit = Callable[[Unit, Sequence[MetricResult]], None]
_OBSERVED = "observed"
_BOS = "bos"
_OF_SCHEMES = ("through", "content_hash", "scheme_version")
_COLUMNS = (*_OF_SCHEMES, _BOS)  # parameters with separate columns

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResultOrigin:
    """Origin of results: the fields that all records of a run share."""

    model: str
    model_hash: str
    seed: int
    run: RunInfo
    commit: CommitInfo
    device: DeviceInfo
    environment: dict[str, str]


class Recording:
    """An open run to which results are added as they arrive.

    Raises UsageError if a requested unit was evaluated by the run with other options.
    """

    def __init__(self, run: OpenRun, origin: ResultOrigin) -> None:
        self._run, self._origin = run, origin
        with run.database.session() as session:
            self._stored = _by_unit(
                queries.stored_records(session, AccuracyRecord, Filters(runs=(run.info.uuid,)))
            )

    def reusable(self, unit: Unit, parameters: Mapping[str, Any]) -> list[MetricResult]:
        """Return the run's results of a unit under these parameters; empty: failed or missing.

        Raises UsageError if the stored results are of another model, commit or seed, or of other
        options: all results of one run must be comparable.
        """
        return _reusable(self._of(unit), self._origin, parameters)

    def add(self, unit: Unit, findings: Sequence[MetricResult], origin: ResultOrigin) -> None:
        """Store the results of a unit; a result without a value makes the run fail.

        origin: of this run, with the device that evaluated the unit.
        """
        attempt = self._of(unit).attempts + 1
        records = [build_record(finding, origin, attempt) for finding in findings]
        self._run.store(lambda session: add_records(session, records))
        if any(finding.value is None for finding in findings):
            self._run.status = "failed"

    def evaluated(
        self, evaluator: Evaluator, unit: Unit, on_unit: OnUnit
    ) -> Sequence[MetricResult]:
        """Return the run's results of a unit; evaluate it and store them unless they are stored."""
        findings = self.reusable(unit, evaluator.parameters(*unit))
        if not findings:
            findings = evaluator.evaluate(*unit)
            self.add(unit, findings, self._origin)
        on_unit(unit, findings)
        return findings

    def _of(self, unit: Unit) -> _Stored:
        return self._stored.get((unit[0], task_name(unit[1])), _Stored())


@contextmanager
def recording(database: Database, origin: ResultOrigin) -> Iterator[Recording]:
    """Open the run of `origin` to store results; its final status is set as in open_run."""
    with open_run(database, origin.run, origin.commit) as run:
        yield Recording(run, origin)


def execute(
    database: Database,
    evaluator: Evaluator,
    units: Sequence[Unit],
    origin: ResultOrigin,
    *,
    on_unit: OnUnit,
) -> list[MetricResult]:
    """Evaluate the units in order, store the results of each, and return all results.

    Units with stored results under the same parameters are not evaluated again. Raises UsageError
    as Recording.reusable.
    """
    with recording(database, origin) as run:
        return [result for unit in units for result in run.evaluated(evaluator, unit, on_unit)]


def build_record(finding: MetricResult, origin: ResultOrigin, attempt: int = 1) -> AccuracyRecord:
    """Build the record of a result, created now. attempt: from 1 within the run."""
    identity = f"{origin.run.uuid} {finding.scheme} {finding.task} {finding.metric} {attempt}"
    return AccuracyRecord(
        uuid=name_uuid(identity, kind="accuracy"),
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
        parameters={
            **{name: v for name, v in finding.parameters.items() if name not in _COLUMNS},
            _OBSERVED: dict(finding.observed),
        },
        through=finding.through,
        content_hash=finding.content_hash,
        scheme_version=finding.parameters.get("scheme_version"),
        bos=finding.parameters.get(_BOS),
        created_at=datetime.now(UTC).isoformat(),
        run=origin.run,
        commit=origin.commit,
        device=origin.device,
        environment=origin.environment,
    )


def finding_of(record: AccuracyRecord) -> MetricResult:
    """Convert a record back to the result it was built from."""
    parameters = dict(record.parameters)
    observed = parameters.pop(_OBSERVED, {})
    if record.bos is not None:
        parameters[_BOS] = record.bos
    if record.scheme not in (FULL_PRECISION, ORIGINAL):
        own = {name: getattr(record, name) for name in _OF_SCHEMES}
        parameters |= {name: value for name, value in own.items() if value is not None}
    return MetricResult(
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


@dataclass(frozen=True, slots=True)
class _Stored:
    """Stored results of a unit in a run. records: of the last attempt."""

    attempts: int = 0
    records: tuple[AccuracyRecord, ...] = ()


def _by_unit(records: Iterable[AccuracyRecord]) -> dict[Unit, _Stored]:
    units: dict[Unit, _Stored] = {}
    for record in records:  # in the order of evaluation
        unit = (record.scheme, record.task)
        before = units.get(unit, _Stored())
        is_repeated = record.metric in {known.metric for known in before.records}
        if is_repeated or before.attempts == 0:
            units[unit] = _Stored(before.attempts + 1, (record,))
        else:
            units[unit] = _Stored(before.attempts, (*before.records, record))
    return units


def _reusable(
    stored: _Stored, origin: ResultOrigin, parameters: Mapping[str, Any]
) -> list[MetricResult]:
    if any(record.status != "ok" for record in stored.records):
        return []
    wanted = json.loads(json.dumps(parameters))
    for record in stored.records:
        current = (origin.model_hash, origin.seed, origin.commit.sha, origin.commit.dirty)
        recorded = (record.model_hash, record.seed, record.commit.sha, record.commit.dirty)
        stored_parameters = finding_of(record).parameters
        given = {name: stored_parameters.get(name) for name in wanted}
        if current != recorded or given != wanted:
            what = (
                "of another model, commit or seed" if current != recorded else "with other options"
            )
            raise UsageError(
                f"{record.scheme} on {record.task} was evaluated {what} in run "
                f"{record.run.uuid[:8]}: start a new run"
            )
    return [finding_of(record) for record in stored.records]
