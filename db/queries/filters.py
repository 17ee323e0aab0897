"""Filters that select the measurements of a query."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, and_, exists, or_
from sqlalchemy.orm import aliased

from db.tables import Measurement, Run, Series


@dataclass(frozen=True, slots=True)
class Filters:
    """Every field narrows; an empty one lets everything through.

    runs: uuids. kernels: names without variant. since, until: when it was measured, both
    inclusive. accepted_only: leave out what may not be compared. without_triggers: leave out runs
    that were started so. projects: of whose repositories; the empty name: of this one.
    """

    runs: tuple[str, ...] = ()
    suites: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()
    m: tuple[int, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    accepted_only: bool = False
    without_triggers: tuple[str, ...] = ()
    projects: tuple[str, ...] = ()

    def on_series(self) -> list[ColumnElement[bool]]:
        """The conditions that a series alone decides."""
        return [
            column.in_(wanted)
            for column, wanted in (
                (Series.kernel, self.kernels),
                (Series.gpu, self.gpus),
                (Series.stage, self.stages),
                (Series.cache, self.caches),
                (Series.m, self.m),
                (Series.project, self.projects),
            )
            if wanted
        ]

    def on_measurement(self) -> list[ColumnElement[bool]]:
        """The conditions that need the measurement or its run."""
        conditions: list[ColumnElement[bool]] = [
            column.in_(wanted)
            for column, wanted in (
                (Run.uuid, self.runs),
                (Run.suite, self.suites),
                (Measurement.model, self.models),
                (Measurement.layer, self.layers),
                (Measurement.status, self.statuses),
            )
            if wanted
        ]
        if self.since is not None:
            conditions.append(Measurement.created_at >= self.since)
        if self.until is not None:
            conditions.append(Measurement.created_at <= self.until)
        if self.accepted_only:
            conditions.append(Measurement.accepted.is_(True))
        if self.without_triggers:
            conditions.append(Run.trigger.not_in(self.without_triggers))
        return conditions


def is_latest_attempt() -> ColumnElement[bool]:
    """A case may be measured again in a run; only its last measurement on each kind of GPU counts.

    The kind is the SKU, not the series: an attempt that failed before the kernel was known lies in
    a series of its own. The query that uses this joins Series.
    """
    later, its_series = aliased(Measurement), aliased(Series)
    return ~exists().where(
        later.run_id == Measurement.run_id,
        later.case_key == Measurement.case_key,
        its_series.id == later.series_id,
        its_series.gpu == Series.gpu,
        or_(
            later.created_at > Measurement.created_at,
            and_(later.created_at == Measurement.created_at, later.id > Measurement.id),
        ),
    )
