"""Served speed as series of a project: each metric of each engine, with its interval."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flexq_bench.db.records import EXTERNAL_BACKEND, CommitInfo, DeviceInfo, Record
from flexq_bench.exchange.external.records import Origin, external_records
from flexq_bench.exchange.external.result import ExternalResult, Reading
from flexq_bench.served.speed.gate import Measured, SpeedReport
from flexq_bench.served.speed.metrics import Metric, metric, pooled_interval, segment_value
from flexq_bench.workloads.case import SERVING, Case
from flexq_bench.workloads.operation import OperationWorkload, format_values

PROJECT = "served"  # of engines that are no commits of a project
# Of every table in addition to its own: of the latencies also their tails.
_STORED = (
    *(f"{how}_{part}" for part in ("ttft", "tpot", "e2e") for how in ("median", "p99")),
    "tokens_per_s",
    "requests_per_s",
)
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
_MAX_LABEL = 200


def speed_records(
    report: SpeedReport,
    side: str,
    *,
    label: str,
    commit: CommitInfo,
    device: DeviceInfo,
    occasion: str,
    environment: Mapping[str, str] | None = None,
    project: str = PROJECT,
    seed: int = 0,
) -> list[Record]:
    """Return the results of one engine of a report, a record of each table and metric.

    side: base or head. label: of the engine, part of its series; empty: the commit identifies it.
    occasion: id of the gate, so that another one of the same commit is another point.
    """
    results = []
    for measured in report.measured:
        names = dict.fromkeys((*measured.table.metrics, *_STORED))
        for of in map(metric, names):
            result = _result(report, measured, side, of, label, seed)
            if result is not None:
                results.append(replace(result, environment=dict(environment or {})))
    origin = Origin(project, commit=commit, device=device.sku, occasion=occasion)
    records, _ = external_records(Reading(tuple(results)), origin)
    return [replace(record, device=device) for record in records]


class ServedDevice:
    """The device of both engines, with the identity of its series (verdicts.nightly)."""

    def __init__(self, device: DeviceInfo, project: str) -> None:
        self.device, self._project = device, project

    def series_of(self, case: Case) -> dict[str, Any]:
        """Return the identity of a metric's series, as `speed_records` of a commit has it."""
        workload = case.workload
        assert isinstance(workload, OperationWorkload)
        of, parameters = _split(workload)
        return {
            "kernel": case.kernel,
            "kernel_version": 1,
            "variant": "",
            "backend": EXTERNAL_BACKEND,
            "stage": "",
            "cache": "",
            "metric": of.name,
            "unit": of.unit,
            "direction": of.direction,
            "operation": SERVING,
            "parameters": parameters,
            "m": None,
            "n": None,
            "k": None,
            "weight_bits": 0,
            "act_bits": 0,
            "group": None,
            "input_distribution": "",
            "protocol_version": 0,
            "gpu": self.device.sku,
            "project": self._project,
        }


def _result(
    report: SpeedReport, measured: Measured, side: str, of: Metric, label: str, seed: int
) -> ExternalResult | None:
    table, segments = measured.table, measured.segments(side)
    pooled = pooled_interval(of, segments, table.latency_limits, seed=seed) if segments else None
    if pooled is None:
        return None
    case = table.case(report.model, of)
    assert isinstance(case.workload, OperationWorkload)
    values = tuple(segment_value(of, segment, table.latency_limits) for segment in segments)
    failed = sum(segment.failed for segment in segments)
    return ExternalResult(
        name=case.kernel,
        variant=_UNPRINTABLE.sub("?", label)[:_MAX_LABEL],
        median=pooled.estimate,
        low=pooled.low,
        high=pooled.high,
        samples=tuple(value for value in values if value == value),
        n_samples=len(values),
        metric=of.name,
        unit=of.unit,
        direction=of.direction,
        operation=SERVING,
        parameters=_split(case.workload)[1],
        extra={"side": side, "failed_requests": failed},
        remarks=(f"{failed} requests failed",) if failed else (),
    )


def _split(workload: OperationWorkload) -> tuple[Metric, str]:
    """Return the metric of a case, and its other parameters as text."""
    values = dict(workload.values)
    of = metric(str(values.pop("metric")))
    return of, format_values(tuple(values.items()), " ")
