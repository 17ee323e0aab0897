"""Queries for measurements: summaries, and the raw samples of one measurement."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from flexq_bench.db.errors import NotFoundError
from flexq_bench.db.queries.filters import Filters, is_latest_attempt
from flexq_bench.db.samples import unpack
from flexq_bench.db.tables import Commit, Measurement, Run, Sample, Series


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One measurement without its samples. Units and None as in db.records.Record."""

    uuid: str
    run: str  # uuid
    suite: str
    case: str
    series_id: int
    kernel: str
    variant: str
    backend: str
    stage: str
    cache: str
    gpu: str
    model: str
    layer: str
    m: int
    n: int
    k: int
    weight_bits: int
    act_bits: int
    status: str
    detail: str
    accepted: bool
    median_us: float | None
    ci_low_us: float | None
    ci_high_us: float | None
    n_samples: int
    floor_us: float | None
    pct_of_floor: float | None
    launch_us: float | None
    tops: float | None
    max_rel_error: float | None
    exact: bool | None
    config: dict[str, Any]
    commit: str  # sha
    dirty: bool
    created_at: datetime
    protocol_version: int
    regime: str | None


RESULT_COLUMNS = (
    Measurement.uuid,
    Run.uuid,
    Run.suite,
    Measurement.case_key,
    Measurement.series_id,
    Series.kernel,
    Series.variant,
    Series.backend,
    Series.stage,
    Series.cache,
    Series.gpu,
    Measurement.model,
    Measurement.layer,
    Series.m,
    Series.n,
    Series.k,
    Series.weight_bits,
    Series.act_bits,
    Measurement.status,
    Measurement.detail,
    Measurement.accepted,
    Measurement.median_us,
    Measurement.ci_low_us,
    Measurement.ci_high_us,
    Measurement.n_samples,
    Measurement.floor_us,
    Measurement.pct_of_floor,
    Measurement.launch_us,
    Measurement.tops,
    Measurement.max_rel_error,
    Measurement.exact,
    Measurement.config,
    Commit.sha,
    Commit.dirty,
    Measurement.created_at,
    Series.protocol_version,
    Measurement.regime,
)


def results_table(
    session: Session, filters: Filters | None = None, *, limit: int | None = None
) -> list[ResultRow]:
    """Return one row per run and case (its last measurement), newest run first."""
    filters = filters or Filters()
    query = (
        select(*RESULT_COLUMNS)
        .select_from(Measurement)
        .join(Run, Measurement.run_id == Run.id)
        .join(Series, Measurement.series_id == Series.id)
        .join(Commit, Measurement.commit_id == Commit.id)
        .where(*filters.on_series(), *filters.on_measurement(), is_latest_attempt())
        .order_by(Run.created_at.desc(), Run.id.desc(), Measurement.created_at, Measurement.id)
        .limit(limit)
    )
    return [ResultRow(*row) for row in session.execute(query)]


def run_results(session: Session, run_uuid: str) -> list[ResultRow]:
    """Return the results of a run in measurement order; empty: no results, or no such run."""
    return results_table(session, Filters(runs=(run_uuid,)))


def samples_of(session: Session, measurement_uuid: str) -> tuple[tuple[float, ...], ...]:
    """Return raw samples in microseconds by placement, in measurement order.

    Empty: never timed, or pruned. Raises NotFoundError if the measurement is not stored.
    """
    row = session.execute(
        select(Sample.data, Sample.placement_counts)
        .select_from(Measurement)
        .outerjoin(Sample, Sample.measurement_id == Measurement.id)
        .where(Measurement.uuid == measurement_uuid)
    ).one_or_none()
    if row is None:
        raise NotFoundError(f"no measurement {measurement_uuid} is stored")
    return () if row.data is None else unpack(row.data, row.placement_counts)
