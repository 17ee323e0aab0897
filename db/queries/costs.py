"""Measured durations of cases, for estimates, and the compute capability of a SKU."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from flexq_bench.db.tables import Device, Measurement, Series

WALL_S = "wall_s"  # in a measurement's `extra`: seconds from its start to its end


def case_seconds(
    session: Session, gpu: str | None = None, *, limit: int = 20_000
) -> list[tuple[str, float]]:
    """Return case keys and wall times (s) of measurements, newest first. gpu: only on this SKU."""
    seconds = Measurement.extra[WALL_S].as_float()
    query = (
        select(Measurement.case_key, seconds)
        .join(Series, Measurement.series_id == Series.id)
        .where(seconds >= 0)
        .order_by(Measurement.created_at.desc(), Measurement.id.desc())
        .limit(limit)
    )
    if gpu is not None:
        query = query.where(Series.gpu == gpu)
    return [(key, float(value)) for key, value in session.execute(query)]


def capability_of(session: Session, gpu: str) -> tuple[int, int] | None:
    """Return the compute capability of a SKU; None: no such device is stored, or it is a CPU."""
    text = session.scalar(
        select(Device.compute_capability).where(Device.sku == gpu).order_by(Device.id.desc())
    )
    if text is None:
        return None
    major, _, minor = text.partition(".")
    return int(major), int(minor)
