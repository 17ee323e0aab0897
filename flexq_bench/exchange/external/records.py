"""Conversion of results of other tools to records."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexq_bench.db.identity import content_uuid
from flexq_bench.db.records import EXTERNAL_BACKEND, CommitInfo, DeviceInfo, Record, RunInfo
from flexq_bench.exchange.external.result import MOST_BYTES, ExternalResult
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
        return hashlib.sha256(file.read(MOST_BYTES + 1)).hexdigest()


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
    return [_record(one, origin, run) for one in results]


def _record(one: ExternalResult, origin: Origin, run: RunInfo) -> Record:
    sku = origin.device or one.device or UNKNOWN_DEVICE
    m, n, k = one.shape
    label = kernel_label(one.name, one.variant)
    case = " ".join(
        filter(None, (label, EXTERNAL_BACKEND, one.cache, f"m{m}n{n}k{k}", one.metric, f"on {sku}"))
    )
    ok = one.median is not None
    is_gemm = one.metric == "time" and min(one.shape) > 1
    operations = GemmWorkload(m, n, k).operations if is_gemm else None
    return Record(
        uuid=record_uuid(run.uuid, case, 1),
        case=case,
        kernel=one.name,
        variant=one.variant,
        kernel_version=_VERSION,
        backend=EXTERNAL_BACKEND,
        stage="",
        cache=one.cache,
        metric=one.metric,
        unit=one.unit,
        direction=one.direction,
        m=m,
        n=n,
        k=k,
        weight_bits=0,
        act_bits=0,
        group=None,
        protocol_version=0,
        gpu=sku,
        status="ok" if ok else "failed",
        detail=one.detail,
        median_us=one.median,
        ci_low_us=one.low,
        ci_high_us=one.high,
        n_samples=one.n_samples,
        samples_us=(one.samples,) if one.samples else (),
        tops=tera_operations(operations, one.median),
        accepted=ok,
        config={},
        binary_hash=None,
        created_at=origin.created_at,
        run=run,
        commit=origin.commit,
        device=DeviceInfo(uuid=f"{EXTERNAL_BACKEND} {sku}", sku=sku, backend=EXTERNAL_BACKEND),
        environment=dict(one.environment),
        extra=dict(one.extra),
        project=origin.project,
        **UNTIMED,
    )
