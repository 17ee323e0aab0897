"""Query for devices, their settings and the last heartbeat of a worker on each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from flexq_bench.db.tables import Device, Worker


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A device with one set of settings; None as in db.tables.Device.

    last_seen: last heartbeat of a worker on it; None: no worker ran on it.
    """

    uuid: str
    sku: str
    backend: str
    compute_capability: str | None
    memory_bytes: int | None
    power_limit_w: float | None
    ecc: bool | None
    mig: bool | None
    vbios: str | None
    last_seen: datetime | None


def devices(session: Session, *, limit: int | None = None) -> list[DeviceRow]:
    """Return all devices by last_seen, newest first; devices without one come last."""
    seen = (
        select(Worker.device_id, func.max(Worker.heartbeat_at).label("last_seen"))
        .group_by(Worker.device_id)
        .subquery()
    )
    columns = [Device.__table__.columns[n] for n in DeviceRow.__slots__ if n != "last_seen"]
    query = (
        select(*columns, seen.c.last_seen)
        .outerjoin(seen, seen.c.device_id == Device.id)
        .order_by(seen.c.last_seen.desc().nulls_last(), Device.sku, Device.uuid, Device.id)
        .limit(limit)
    )
    return [DeviceRow(**row) for row in session.execute(query).mappings()]
