"""Stored measurements as records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from sqlalchemy import RowMapping, select
from sqlalchemy.orm import Session

from flexq_bench.db.queries.filters import Filters
from flexq_bench.db.queries.runs import run_info
from flexq_bench.db.records import CommitInfo, DeviceInfo, Record, RunInfo
from flexq_bench.db.samples import PackedSamples, unpack
from flexq_bench.db.tables import (
    Commit,
    Device,
    Environment,
    Epoch,
    Measurement,
    Run,
    Sample,
    Series,
)

_BATCH = 500  # records in memory at once
_SERIES_FIELDS = tuple(f.name for f in fields(Record) if f.name in Series.__table__.columns)
_DEVICE_FIELDS = tuple(f.name for f in fields(DeviceInfo))
_MEASUREMENT_FIELDS = tuple(
    f.name
    for f in fields(Record)
    if f.name in Measurement.__table__.columns and f.name not in {"created_at", *_SERIES_FIELDS}
)


def export_records(session: Session, filters: Filters | None = None) -> Iterator[Record]:
    """Iterate over matching records, including repeated attempts; pruned samples are empty.

    The order (run, then time of measurement) is the same in every copy of the data.
    """
    filters = filters or Filters()
    ids = session.scalars(
        select(Measurement.id)
        .join(Run, Measurement.run_id == Run.id)
        .join(Series, Measurement.series_id == Series.id)
        .where(*filters.on_series(), *filters.on_measurement())
        .order_by(Run.created_at, Run.uuid, Measurement.created_at, Measurement.uuid)
    ).all()
    runs: dict[str, RunInfo] = {}
    for start in range(0, len(ids), _BATCH):
        for row in _load(session, ids[start : start + _BATCH]):
            uuid = row["run_uuid"]
            if uuid not in runs:
                runs[uuid] = run_info(session, uuid)
            yield _record(row, runs[uuid])


def run_records(session: Session, run_uuid: str) -> Iterator[Record]:
    """Iterate over the records of a run, including repeated attempts, in measurement order."""
    return export_records(session, Filters(runs=(run_uuid,)))


def _load(session: Session, ids: Sequence[int]) -> Iterator[RowMapping]:
    query = (
        select(Measurement, Series, Commit, Device, Environment, Sample, Run.uuid.label("run_uuid"))
        .join(Series, Measurement.series_id == Series.id)
        .join(Commit, Measurement.commit_id == Commit.id)
        .join(Device, Measurement.device_id == Device.id)
        .join(Epoch, Measurement.epoch_id == Epoch.id)
        .join(Environment, Epoch.environment_id == Environment.id)
        .join(Run, Measurement.run_id == Run.id)
        .outerjoin(Sample, Sample.measurement_id == Measurement.id)
        .where(Measurement.id.in_(ids))
        .execution_options(populate_existing=True)  # rows may have changed since they were loaded
    )
    rows = {row["Measurement"].id: row for row in session.execute(query).mappings()}
    return (rows[measurement_id] for measurement_id in ids)


def _record(row: RowMapping, run: RunInfo) -> Record:
    measurement: Measurement = row["Measurement"]
    device: Device = row["Device"]
    values = {name: getattr(row["Series"], name) for name in _SERIES_FIELDS}
    values |= {name: getattr(measurement, name) for name in _MEASUREMENT_FIELDS}
    values |= {
        "case": measurement.case_key,
        "placement_medians_us": tuple(measurement.placement_medians_us),
        "samples_us": _samples(row["Sample"]),
        "created_at": measurement.created_at.isoformat(),
        "run": run,
        "commit": commit_info(row["Commit"]),
        "device": DeviceInfo(**{name: getattr(device, name) for name in _DEVICE_FIELDS}),
        "environment": row["Environment"].content,
    }
    return Record(**values)


def _samples(sample: Sample | None) -> tuple[tuple[float, ...], ...]:
    if sample is None:
        return ()
    return unpack(PackedSamples(sample.data, sample.placement_counts))


def commit_info(commit: Commit) -> CommitInfo:
    """Convert a stored commit to the form used in records."""
    return CommitInfo(
        sha=commit.sha,
        parent=commit.parent_sha,
        topo_order=commit.topo_order,
        dirty=commit.dirty,
        subject=commit.subject,
        author=commit.author,
        committed_at=commit.committed_at.isoformat() if commit.committed_at else None,
        project=commit.project,
    )
