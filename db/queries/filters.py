"""Filters that select the measurements of a query."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, or_
from sqlalchemy.orm import aliased

from flexq_bench.db.queries.lines import is_on_main
from flexq_bench.db.tables import Device, Measurement, Run, Series

# Kernel, GPU, shape. Databases differ in the place of nulls.
SERIES_ORDER: tuple[Any, ...] = (
    Series.kernel,
    Series.variant,
    Series.gpu,
    Series.operation,
    *(column.nulls_first() for column in (Series.n, Series.k, Series.m)),
    Series.parameters,
    Series.id,
)


@dataclass(frozen=True, slots=True)
class Filters:
    """Conditions on measurements, combined with AND; an empty field selects all.

    runs: uuids. kernels: names without variant. since, until: time of measurement, inclusive.
    accepted_only: only measurements that may be compared. without_triggers: exclude runs with
    these triggers. projects: names of external projects; the empty name: this repository.
    main_line: only results at commits of the main line.
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
    operations: tuple[str, ...] = ()
    m: tuple[int, ...] = ()
    n: tuple[int, ...] = ()
    k: tuple[int, ...] = ()
    variants: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    accepted_only: bool = False
    without_triggers: tuple[str, ...] = ()
    projects: tuple[str, ...] = ()
    main_line: bool = False

    def on_series(self) -> list[ColumnElement[bool]]:
        """Return the conditions on columns of Series."""
        return [
            column.in_(values)
            for column, values in (
                (Series.kernel, self.kernels),
                (Series.gpu, self.gpus),
                (Series.stage, self.stages),
                (Series.cache, self.caches),
                (Series.operation, self.operations),
                (Series.m, self.m),
                (Series.n, self.n),
                (Series.k, self.k),
                (Series.variant, self.variants),
                (Series.parameters, self.parameters),
                (Series.metric, self.metrics),
                (Series.project, self.projects),
            )
            if values
        ]

    def can_match_models(self) -> bool:
        """Return True if results of whole models, which are all of this repository, can match."""
        applicable = Filters(
            runs=self.runs,
            suites=self.suites,
            models=self.models,
            gpus=self.gpus,
            projects=self.projects,
        )
        return self == applicable and (not self.projects or "" in self.projects)

    def on_model_results(self, table: Any) -> list[ColumnElement[bool]]:
        """Return the conditions on columns of a table of whole-model results, Run and Device."""
        return [
            column.in_(values)
            for column, values in (
                (Run.uuid, self.runs),
                (Run.suite, self.suites),
                (table.model, self.models),
                (Device.sku, self.gpus),
            )
            if values
        ]

    def on_measurement(self) -> list[ColumnElement[bool]]:
        """Return the conditions on columns of Measurement and Run."""
        conditions: list[ColumnElement[bool]] = [
            column.in_(values)
            for column, values in (
                (Run.uuid, self.runs),
                (Run.suite, self.suites),
                (Measurement.model, self.models),
                (Measurement.layer, self.layers),
                (Measurement.status, self.statuses),
            )
            if values
        ]
        if self.since is not None:
            conditions.append(Measurement.created_at >= self.since)
        if self.until is not None:
            conditions.append(Measurement.created_at <= self.until)
        if self.accepted_only:
            conditions.append(Measurement.accepted.is_(True))
        if self.main_line:
            conditions.append(is_on_main(Measurement.commit_id.expression))
        if self.without_triggers:
            conditions.append(Run.trigger.not_in(self.without_triggers))
        return conditions


def is_latest_attempt() -> ColumnElement[bool]:
    """Return the condition that a measurement is the last of its case on its SKU in the run.

    SKUs are compared, not series: an attempt that failed before the kernel was known belongs to a
    series of its own. The query must join Series.
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
