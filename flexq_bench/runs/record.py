"""Conversion of a measurement to a stored record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flexq_bench.db.encoding import canonical
from flexq_bench.db.errors import RecordError
from flexq_bench.db.identity import name_uuid
from flexq_bench.db.records import TIME_METRICS, CommitInfo, DeviceInfo, Record, RunInfo
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import format_values
from flexq_bench.workloads.probes import is_probe

if TYPE_CHECKING:  # importing it imports torch, which takes a second
    from flexq_bench.measure import Measured

_OPERATIONS_A_TERA = 1e12
_US_A_SECOND = 1e6
# Fields of a record that are null for values not timed by our protocol.
_TIMING_FIELDS = (
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
# Fields of a record that are null without a result.
_RESULT_FIELDS = (*_TIMING_FIELDS, "median_us", "ci_low_us", "ci_high_us", "tops", "binary_hash")
# Values of fields for results not timed by our protocol: another tool's, or static metrics.
UNTIMED: Mapping[str, Any] = dict.fromkeys(_TIMING_FIELDS) | {
    "input_distribution": "",
    "model": "",
    "layer": "",
    "placement_medians_us": (),
    "seed": 0,
    "n_invalid": 0,
}


def record_uuid(run_uuid: str, case_key: str, attempt: int, repetition: int = 1) -> str:
    """The deterministic uuid of a measurement."""
    suffix = f" repetition {repetition}" if repetition > 1 else ""
    return name_uuid(f"{run_uuid} {case_key} {attempt}{suffix}")


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
    """Build the record of one measurement. created_at None: now.

    attempt, repetition: numbers from 1 within the run and case.

    A record is accepted, so that it may enter a history, if it is correct and of a clean tree, was
    timed at a valid clock, and no other process used the GPU. A result that can't be stored (a NUL
    in a text, a time that is not finite) becomes a failed one with the reason.
    """
    operations = None if is_probe(case.kernel) else case.workload.operations
    gemm = case.workload if isinstance(case.workload, GemmWorkload) else None
    measured = _noisy_if_shared(measured)
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
        m=None if gemm is None else gemm.m,
        n=None if gemm is None else gemm.n,
        k=None if gemm is None else gemm.k,
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
        accepted=measured.is_comparable and not commit.dirty and not _other_processes(measured),
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
        operation=case.operation,
        parameters=format_values(case.workload.values, " "),
    )
    return _storable(record)


def _other_processes(measured: Measured) -> int:
    """Number of other processes that used the GPU during the measurement."""
    return int(measured.extra.get("other_processes") or 0)


def _noisy_if_shared(measured: Measured) -> Measured:
    n_others = _other_processes(measured)
    if not n_others or measured.status != "ok":
        return measured
    detail = (
        f"{n_others} other processes computed on this GPU: its time is stored, but never compared; "
        "end them (nvidia-smi shows them)"
    )
    return replace(measured, status="noisy", detail=detail)


def _storable(record: Record) -> Record:
    """Escape control characters of the detail; if the record can't be stored, return a failed one
    of the same series."""
    cleaned = replace(record, detail=_clean(record.detail))
    try:
        canonical(cleaned)
    except RecordError as error:
        extra = {name: record.extra[name] for name in ("attempt", "repetition")}
        return replace(
            cleaned,
            status="failed",
            detail=_clean(f"its result can't be stored: {error}"),
            accepted=False,
            **dict.fromkeys(_RESULT_FIELDS),  # type: ignore[arg-type]  # fields that may be null
            placement_medians_us=(),
            samples_us=(),
            n_samples=0,
            n_invalid=0,
            config={},
            extra=extra,
        )
    return cleaned


def _clean(text: str) -> str:
    return text.encode(errors="backslashreplace").decode().replace("\x00", r"\x00")


def percent_of_floor(floor_us: float | None, median_us: float | None) -> float | None:
    """100 · floor / time; 100 is the time of reading the weights. None: one is missing."""
    if floor_us is None or not median_us:
        return None
    return 100.0 * floor_us / median_us


def tera_operations(operations: float | None, median_us: float | None) -> float | None:
    """10^12 operations per second. None: not counted, or never timed."""
    if operations is None or not median_us:
        return None
    return operations / _OPERATIONS_A_TERA / (median_us / _US_A_SECOND)
