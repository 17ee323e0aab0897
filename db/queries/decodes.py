"""Stored decode and serving results as records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from flexq_bench.db.decode_records import DecodeRecord, ProcessDecode, ServingRecord
from flexq_bench.db.decode_store import TABLES, copied_fields
from flexq_bench.db.queries.filters import Filters
from flexq_bench.db.queries.records import commit_info
from flexq_bench.db.queries.runs import run_info
from flexq_bench.db.records import DeviceInfo, RunInfo
from flexq_bench.db.samples import PackedSamples, unpack
from flexq_bench.db.tables import (
    Commit,
    DecodeResult,
    DecodeSample,
    Device,
    Environment,
    Run,
    ServingResult,
)

_LISTS = ("process_medians_ms", "parts")  # tuples in records


def decode_results(
    session: Session,
    *,
    runs: Sequence[str] = (),
    suites: Sequence[str] = (),
    models: Sequence[str] = (),
    gpus: Sequence[str] = (),
) -> Iterator[DecodeRecord]:
    """Iterate over stored decodes, ordered by run, then time of measurement.

    runs: uuids. gpus: SKUs. An empty filter selects all.
    """
    for record in _results(session, DecodeRecord, runs, suites, models, gpus):
        assert isinstance(record, DecodeRecord)
        yield record


def serving_results(
    session: Session,
    *,
    runs: Sequence[str] = (),
    suites: Sequence[str] = (),
    models: Sequence[str] = (),
    gpus: Sequence[str] = (),
) -> Iterator[ServingRecord]:
    """Iterate over stored serving results; arguments and order as in decode_results."""
    for record in _results(session, ServingRecord, runs, suites, models, gpus):
        assert isinstance(record, ServingRecord)
        yield record


def export_decodes(session: Session, filters: Filters) -> Iterator[DecodeRecord | ServingRecord]:
    """Iterate over matching decode and serving results; none if a filter does not apply to them."""
    if filters.can_match_models():
        narrowed = (filters.runs, filters.suites, filters.models, filters.gpus)
        yield from _results(session, DecodeRecord, *narrowed)
        yield from _results(session, ServingRecord, *narrowed)


def _results(
    session: Session,
    kind: type[DecodeRecord | ServingRecord],
    runs: Sequence[str],
    suites: Sequence[str],
    models: Sequence[str],
    gpus: Sequence[str],
) -> Iterator[DecodeRecord | ServingRecord]:
    table: type[DecodeResult] | type[ServingResult] = TABLES[kind]
    query = (
        select(table, Commit, Device, Environment, Run.uuid)
        .join(Run, table.run_id == Run.id)
        .join(Commit, table.commit_id == Commit.id)
        .join(Device, table.device_id == Device.id)
        .join(Environment, table.environment_id == Environment.id)
        .order_by(Run.created_at, Run.uuid, table.created_at, table.uuid)
    )
    for column, accepted in (
        (Run.uuid, runs),
        (Run.suite, suites),
        (table.model, models),
        (Device.sku, gpus),
    ):
        if accepted:
            query = query.where(column.in_(accepted))
    infos: dict[str, RunInfo] = {}
    for row in session.execute(query):
        result: Any = row[0]  # a DecodeResult or a ServingResult
        _, commit, device, environment, uuid = row
        if uuid not in infos:
            infos[uuid] = run_info(session, uuid)
        values = {name: getattr(result, name) for name in copied_fields(kind)}
        values |= {name: tuple(values[name]) for name in _LISTS if name in values}
        if kind is DecodeRecord:
            values["processes"] = _processes(session, result.id)
        yield kind(
            **values,
            created_at=result.created_at.isoformat(),
            run=infos[uuid],
            commit=commit_info(commit),
            device=DeviceInfo(**{f.name: getattr(device, f.name) for f in fields(DeviceInfo)}),
            environment=environment.content,
        )


def _processes(session: Session, result_id: int) -> tuple[ProcessDecode, ...]:
    query = (
        select(DecodeSample)
        .where(DecodeSample.decode_result_id == result_id)
        .order_by(DecodeSample.number)
    )
    names = [f.name for f in fields(ProcessDecode) if f.name != "step_ms"]
    return tuple(
        ProcessDecode(
            **{name: getattr(sample, name) for name in names},
            step_ms=unpack(PackedSamples(sample.data, [sample.count]))[0],
        )
        for sample in session.scalars(query)
    )
