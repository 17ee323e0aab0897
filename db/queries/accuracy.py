"""Stored accuracy results as records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from sqlalchemy import RowMapping, select
from sqlalchemy.orm import Session

from flexq_bench.db.accuracy_records import AccuracyRecord
from flexq_bench.db.queries.filters import Filters
from flexq_bench.db.queries.records import commit_info
from flexq_bench.db.queries.runs import run_info
from flexq_bench.db.records import DeviceInfo, RunInfo
from flexq_bench.db.samples import PackedSamples, unpack
from flexq_bench.db.tables import AccuracyResult, AccuracySample, Commit, Device, Environment, Run

_COLUMNS = tuple(
    f.name
    for f in fields(AccuracyRecord)
    if f.name in AccuracyResult.__table__.columns and f.name != "created_at"
)


def accuracy_results(
    session: Session,
    *,
    runs: Sequence[str] = (),
    suites: Sequence[str] = (),
    models: Sequence[str] = (),
    gpus: Sequence[str] = (),
) -> Iterator[AccuracyRecord]:
    """Iterate over stored accuracy results, ordered by run, then time of evaluation.

    runs: uuids. gpus: SKUs. An empty filter selects all.
    """
    query = (
        select(
            AccuracyResult, Commit, Device, Environment, AccuracySample, Run.uuid.label("run_uuid")
        )
        .join(Run, AccuracyResult.run_id == Run.id)
        .join(Commit, AccuracyResult.commit_id == Commit.id)
        .join(Device, AccuracyResult.device_id == Device.id)
        .join(Environment, AccuracyResult.environment_id == Environment.id)
        .outerjoin(AccuracySample, AccuracySample.accuracy_result_id == AccuracyResult.id)
        .order_by(Run.created_at, Run.uuid, AccuracyResult.created_at, AccuracyResult.uuid)
    )
    for column, values in (
        (Run.uuid, runs),
        (Run.suite, suites),
        (AccuracyResult.model, models),
        (Device.sku, gpus),
    ):
        if values:
            query = query.where(column.in_(values))
    infos: dict[str, RunInfo] = {}
    for row in session.execute(query).mappings():
        uuid = row["run_uuid"]
        if uuid not in infos:
            infos[uuid] = run_info(session, uuid)
        yield _record(row, infos[uuid])


def export_accuracy(session: Session, filters: Filters) -> Iterator[AccuracyRecord]:
    """Iterate over accuracy results that match; none if a filter does not apply to them."""
    if filters.can_match_models():
        yield from accuracy_results(
            session,
            runs=filters.runs,
            suites=filters.suites,
            models=filters.models,
            gpus=filters.gpus,
        )


def _record(row: RowMapping, run: RunInfo) -> AccuracyRecord:
    result: AccuracyResult = row["AccuracyResult"]
    device: Device = row["Device"]
    return AccuracyRecord(
        **{name: getattr(result, name) for name in _COLUMNS},
        values=_values(row["AccuracySample"]),
        created_at=result.created_at.isoformat(),
        run=run,
        commit=commit_info(row["Commit"]),
        device=DeviceInfo(**{f.name: getattr(device, f.name) for f in fields(DeviceInfo)}),
        environment=row["Environment"].content,
    )


def _values(sample: AccuracySample | None) -> tuple[float, ...]:
    if sample is None:
        return ()
    (values,) = unpack(PackedSamples(sample.data, [sample.count]))
    return values
