"""From what was measured to the record that is stored."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from db.encoding import canonical
from db.errors import RecordError
from db.records import TIME_METRICS, CommitInfo, DeviceInfo, Record, RunInfo
from flexq_bench.measure import Measured
from workloads.case import Case
from workloads.probes import is_probe

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "flexq-bench")
_OPERATIONS_A_TERA = 1e12
_US_A_SECOND = 1e6
# Fields of a record that are null where our protocol timed nothing.
_OF_TIMING = (
    "floor_us",
    "pct_of_floor",
    "launch_us",
    "max_rel_error",
    "exact",
    "sm_clock_mhz",
    "mem_clock_mhz",
    "power_w",
    "temperature_c",
    "throttle_mask",
)
# Fields of a record that are null where nothing was found.
_FOUND = (*_OF_TIMING, "median_us", "ci_low_us", "ci_high_us", "tops", "binary_hash")
# Fields of a record of a value that our protocol did not time: another tool's, or a static metric.
UNTIMED: Mapping[str, Any] = dict.fromkeys(_OF_TIMING) | {
    "input_distribution": "",
    "model": "",
    "layer": "",
    "placement_medians_us": (),
    "seed": 0,
    "n_invalid": 0,
}


def record_uuid(run_uuid: str, case_key: str, attempt: int, repetition: int = 1) -> str:
    """The identity of a measurement, the same wherever it is computed."""
    again = f" repetition {repetition}" if repetition > 1 else ""
    return str(uuid.uuid5(_NAMESPACE, f"{run_uuid} {case_key} {attempt}{again}"))


def build_record(
    case: Case,
    measured: Measured,
    run: RunInfo,
    commit: CommitInfo,
    device: DeviceInfo,
    environment: dict[str, str],
    attempt: int = 1,
    *,
    repetition: int = 1,
    created_at: datetime | None = None,
) -> Record:
    """The record of one measurement. created_at None: now.

    attempt: counts from 1 within the run. repetition: which of those that the run wants of a case.

    accepted says that the result may enter a history: right, timed, at a sound clock, and of a
    commit that others can check out, not of a dirty tree. A result that no database takes (a NUL
    in a text, a time that is no number) becomes a failed one that says so.
    """
    operations = None if is_probe(case.kernel) else case.gemm.operations
    measured = _judged_by_neighbours(measured)
    record = Record(
        uuid=record_uuid(run.uuid, case.key, attempt, repetition),
        case=case.key,
        kernel=case.kernel,
        variant=case.variant,
        kernel_version=measured.kernel_version,
        backend=device.backend,
        stage=case.stage,
        cache=case.cache,
        metric=TIME_METRICS[measured.regime],
        unit="us",
        direction="lower",
        m=case.gemm.m,
        n=case.gemm.n,
        k=case.gemm.k,
        weight_bits=measured.weight_bits,
        act_bits=measured.act_bits,
        group=measured.group,
        input_distribution=measured.input_distribution,
        protocol_version=measured.protocol_version,
        gpu=device.sku,
        model=case.model,
        layer=case.layer,
        status=measured.status,
        detail=measured.detail,
        median_us=measured.median_us,
        ci_low_us=measured.ci_low_us,
        ci_high_us=measured.ci_high_us,
        n_samples=measured.n_samples,
        placement_medians_us=measured.placement_medians_us,
        samples_us=measured.samples_us,
        floor_us=measured.floor_us,
        pct_of_floor=percent_of_floor(measured.floor_us, measured.median_us),
        launch_us=measured.launch_us,
        tops=tera_operations(operations, measured.median_us),
        max_rel_error=measured.max_rel_error,
        exact=measured.exact,
        accepted=measured.is_comparable and not commit.dirty and not _neighbours(measured),
        config=measured.config,
        binary_hash=measured.binary_hash,
        seed=measured.seed,
        sm_clock_mhz=measured.sm_clock_mhz,
        mem_clock_mhz=measured.mem_clock_mhz,
        power_w=measured.power_w,
        temperature_c=measured.temperature_c,
        throttle_mask=measured.throttle_mask,
        n_invalid=measured.n_invalid,
        created_at=(created_at or datetime.now(UTC)).isoformat(),
        run=run,
        commit=commit,
        device=device,
        environment=environment,
        extra={**measured.extra, "attempt": attempt, "repetition": repetition},
        regime=measured.regime,
        sample_gap_us=measured.sample_gap_us,
        launch_j=measured.launch_j,
        source_hash=measured.source_hash,
        project=commit.project,
    )
    return _storable(record)


def _neighbours(measured: Measured) -> int:
    """Processes that computed on the GPU beside the one that measured."""
    return int(measured.extra.get("other_processes") or 0)


def _judged_by_neighbours(measured: Measured) -> Measured:
    others = _neighbours(measured)
    if not others or measured.status != "ok":
        return measured
    detail = (
        f"{others} other processes computed on this GPU: its time is kept and never compared; end "
        "them (nvidia-smi shows them)"
    )
    return replace(measured, status="noisy", detail=detail)


def _storable(record: Record) -> Record:
    """The record with its detail as text; a failed one of the same series if it can't be stored."""
    told = replace(record, detail=_clean(record.detail))
    try:
        canonical(told)
    except RecordError as error:
        kept = {name: record.extra[name] for name in ("attempt", "repetition")}
        return replace(
            told,
            status="failed",
            detail=_clean(f"its result can't be stored: {error}"),
            accepted=False,
            **dict.fromkeys(_FOUND),  # type: ignore[arg-type]  # fields that may be null
            placement_medians_us=(),
            samples_us=(),
            n_samples=0,
            n_invalid=0,
            config={},
            extra=kept,
        )
    return told


def _clean(text: str) -> str:
    return text.encode(errors="backslashreplace").decode().replace("\x00", r"\x00")


def percent_of_floor(floor_us: float | None, median_us: float | None) -> float | None:
    """100 · floor / median: 100 is as fast as merely reading the weights. None: one is missing."""
    if floor_us is None or not median_us:
        return None
    return 100.0 * floor_us / median_us


def tera_operations(operations: int | None, median_us: float | None) -> float | None:
    """10^12 operations a second. None: no operations to count (a probe), or never timed."""
    if operations is None or not median_us:
        return None
    return operations / _OPERATIONS_A_TERA / (median_us / _US_A_SECOND)
