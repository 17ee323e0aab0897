"""Queries for the A/A calibration and the live false-alarm rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, exists, or_, select
from sqlalchemy.orm import Session, aliased

from flexq_bench.db.identity import fingerprint
from flexq_bench.db.tables import FalseAlarmRate, Noise, Series


@dataclass(frozen=True, slots=True)
class NoiseRow:
    """The newest A/A calibration of a series; units and None as in db.tables.Noise."""

    series_id: int
    kernel: str
    variant: str
    stage: str
    cache: str
    m: int
    n: int
    k: int
    gpu: str
    comparisons: int
    block_sigma: float | None
    placement_sigma: float | None
    comparison_sigma: float | None
    estimate_sigma: float
    noise_floor: float | None
    smallest_step: float | None
    computed_at: datetime


@dataclass(frozen=True, slots=True)
class FalseAlarmRow:
    """False-alarm rate (alarms per canary) at one time, with its interval."""

    since: datetime
    until: datetime
    canaries: int
    alarms: int
    rate: float
    low: float
    high: float
    confidence: float


def aa_calibration(session: Session) -> list[NoiseRow]:
    """Return the newest calibration of every series that has one, by kernel, GPU, shape."""
    query = (
        select(
            Noise.series_id,
            Series.kernel,
            Series.variant,
            Series.stage,
            Series.cache,
            Series.m,
            Series.n,
            Series.k,
            Series.gpu,
            Noise.comparisons,
            Noise.block_sigma,
            Noise.placement_sigma,
            Noise.comparison_sigma,
            Noise.estimate_sigma,
            Noise.noise_floor,
            Noise.smallest_step,
            Noise.computed_at,
        )
        .join(Series, Noise.series_id == Series.id)
        .where(_is_newest())
        .order_by(
            Series.kernel, Series.variant, Series.gpu, Series.n, Series.k, Series.m, Series.id
        )
    )
    return [NoiseRow(**row) for row in session.execute(query).mappings()]


def noise_floors(session: Session, identities: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the noise floor (natural log) of each series identity; 0 if it is unknown."""
    hashes = [fingerprint(identity) for identity in identities]
    query = (
        select(Series.identity_hash, Noise.noise_floor)
        .join(Series, Noise.series_id == Series.id)
        .where(_is_newest(), Noise.noise_floor.is_not(None), Series.identity_hash.in_(set(hashes)))
    )
    known = {row.identity_hash: row.noise_floor for row in session.execute(query)}
    return [known.get(identity, 0.0) for identity in hashes]


def false_alarm_rates(session: Session, *, limit: int | None = None) -> list[FalseAlarmRow]:
    """Return the live false-alarm rate over time, newest first."""
    columns = [
        column
        for column in FalseAlarmRate.__table__.columns
        if column.name not in ("id", "input_hash")
    ]
    newest = (FalseAlarmRate.until.desc(), FalseAlarmRate.id.desc())
    rows = session.execute(select(*columns).order_by(*newest).limit(limit)).mappings()
    return [FalseAlarmRow(**row) for row in rows]


def _is_newest() -> ColumnElement[bool]:
    later = aliased(Noise)
    return ~exists().where(
        later.series_id == Noise.series_id,
        or_(
            later.computed_at > Noise.computed_at,
            (later.computed_at == Noise.computed_at) & (later.id > Noise.id),
        ),
    )
