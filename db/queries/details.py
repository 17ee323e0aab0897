"""Query for the details of one measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from flexq_bench.db.errors import NotFoundError
from flexq_bench.db.queries.results import RESULT_COLUMNS, ResultRow
from flexq_bench.db.tables import Commit, Device, Environment, Epoch, Measurement, Run, Series


@dataclass(frozen=True, slots=True)
class ResultDetail:
    """A result with the state of its device; units and None as in db.records.Record.

    environment: name -> text. extra: additional data, for example the device state before and
    after, and the indices of invalid samples.
    """

    result: ResultRow
    device: str  # uuid
    n_invalid: int
    placement_medians_us: tuple[float, ...]
    seed: int
    sm_clock_mhz: float | None
    mem_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle_mask: int | None
    environment: dict[str, str]
    extra: dict[str, Any]


def result_detail(session: Session, measurement_uuid: str) -> ResultDetail:
    """Return the details of a measurement. Raises NotFoundError if it is not stored."""
    query = (
        select(
            Device.uuid,
            Measurement.n_invalid,
            Measurement.placement_medians_us,
            Measurement.seed,
            Measurement.sm_clock_mhz,
            Measurement.mem_clock_mhz,
            Measurement.power_w,
            Measurement.temperature_c,
            Measurement.throttle_mask,
            Environment.content,
            Measurement.extra,
            *RESULT_COLUMNS,
        )
        .select_from(Measurement)
        .join(Run, Measurement.run_id == Run.id)
        .join(Series, Measurement.series_id == Series.id)
        .join(Commit, Measurement.commit_id == Commit.id)
        .join(Device, Measurement.device_id == Device.id)
        .join(Epoch, Measurement.epoch_id == Epoch.id)
        .join(Environment, Epoch.environment_id == Environment.id)
        .where(Measurement.uuid == measurement_uuid)
    )
    row = session.execute(query).one_or_none()
    if row is None:
        raise NotFoundError(f"no measurement {measurement_uuid} is stored")
    device, n_invalid, medians, *state = row[: -len(RESULT_COLUMNS)]
    result = ResultRow(*row[-len(RESULT_COLUMNS) :])
    return ResultDetail(result, device, n_invalid, tuple(medians), *state)
