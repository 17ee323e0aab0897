"""Conversion of results of other tools to records."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexq_bench.db.identity import content_uuid
from flexq_bench.db.records import EXTERNAL_BACKEND, CommitInfo, DeviceInfo, Record, RunInfo
from flexq_bench.exchange.external.result import MAX_BYTES, ExternalResult
from flexq_bench.runs.record import UNTIMED, record_uuid, tera_operations
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.gemm import GemmWorkload

UNKNOWN_DEVICE = "unknown device"
_VERSION = 1  # of the conversion; increased when the same file gives other series


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of results. file_hash: of the file's content. created_at: ISO 8601, UTC."""

    project: str
    format: str
    commit: CommitInfo
    device: str  # if the file has none; empty: unknown
    created_at: str
    file_hash: str


def file_hash(path: str) -> str:
    """Return the SHA-256 of a file that was read, and so has at most 64 MiB."""
    with Path(path).open("rb") as file:
        return hashlib.sha256(file.read(MAX_BYTES + 1)).hexdigest()


def external_records(results: Sequence[ExternalResult], origin: Origin) -> list[Record]:
    """Convert the results of a file to records of one run.

    The records are the same whenever and wherever the file is imported.
    """
    name = f"{_VERSION} {origin.project} {origin.format} {origin.commit.sha} {origin.file_hash}"
    identity = content_uuid(f"{EXTERNAL_BACKEND} {name} {origin.device}")
    run = RunInfo(
        uuid=identity,
        suite=origin.project,
        trigger="import",
        status="complete",
        created_at=origin.created_at,
        idempotency_key=identity,
    )
    return [_record(result, origin, run) for result in results]


def _record(result: ExternalResult, origin: Origin, run: RunInfo) -> Record:
    sku = origin.device or result.device or UNKNOWN_DEVICE
    m, n, k = result.shape
    label = kernel_label(result.name, result.variant)
    place = f"{result.operation} {result.parameters}" if result.operation else f"m{m}n{n}k{k}"
    parts = (label, EXTERNAL_BACKEND, result.cache, place, result.metric, f"on {sku}")
    case = " ".join(filter(None, parts))
    ok = result.median is not None
    is_gemm = result.metric == "time" and min(result.shape) > 1
    operations = GemmWorkload(m, n, k).operations if is_gemm else None
    return Record(
        uuid=record_uuid(run.uuid, case, 1),
        case=case,
        kernel=result.name,
        variant=result.variant,
        kernel_version=_VERSION,
        backend=EXTERNAL_BACKEND,
        stage="",
        cache=result.cache,
        metric=result.metric,
        unit=result.unit,
        direction=result.direction,
        **({"m": None, "n": None, "k": None} if result.operation else {"m": m, "n": n, "k": k}),
        operation=result.operation or GemmWorkload.operation,
        parameters=result.parameters,
        weight_bits=0,
        act_bits=0,
        group=None,
        protocol_version=0,
        gpu=sku,
        status="ok" if ok else "failed",
        detail=result.detail,
        median_us=result.median,
        ci_low_us=result.low,
        ci_high_us=result.high,
        n_samples=result.n_samples,
        samples_us=(result.samples,) if result.samples else (),
        tops=tera_operations(operations, result.median),
        accepted=ok,
        config={},
        binary_hash=None,
        created_at=origin.created_at,
        run=run,
        commit=origin.commit,
        device=DeviceInfo(uuid=f"{EXTERNAL_BACKEND} {sku}", sku=sku, backend=EXTERNAL_BACKEND),
        environment=dict(result.environment),
        extra=dict(result.extra),
        project=origin.project,
        **UNTIMED,
    )
