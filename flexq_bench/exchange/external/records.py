"""Conversion of results of other tools to records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from flexq_bench.db.identity import content_uuid
from flexq_bench.db.records import EXTERNAL_BACKEND, CommitInfo, DeviceInfo, Record, RunInfo
from flexq_bench.db.writer import TIME_OF_IMPORT
from flexq_bench.exchange.external.result import BadResult, ExternalResult, Reading, Refused
from flexq_bench.runs.record import UNTIMED, record_uuid, tera_operations
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.gemm import GemmWorkload

UNKNOWN_DEVICE = "unknown device"
_MAX_CLOCK_SKEW = timedelta(days=1)  # between machines and time zones
_VERSION = 1  # of the conversion; increased when the same file gives other series


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of results: what a file does not say of them.

    commit: of results that name none; None: they are refused. device, branch: as commit; empty:
    unknown. time: of all results, ISO 8601 in UTC; None: the file's, else now. occasion: id of the
    run; empty: the file's, else its time, else none: then results of the same commit replace
    earlier ones.
    """

    project: str
    commit: CommitInfo | None = None
    device: str = ""
    branch: str = ""
    time: str | None = None
    occasion: str = ""


@dataclass(frozen=True, slots=True)
class _Place:
    """Commit and run of a result; the run has the given time, or the present one."""

    commit: CommitInfo
    run: RunInfo
    about: Mapping[str, Any]  # for `extra`


def external_records(
    reading: Reading, origin: Origin, commits: Mapping[str, CommitInfo] | None = None
) -> tuple[list[Record], list[Refused]]:
    """Convert the results of a file to records; return them, and the results that have no place.

    commits: what is known of commits, by the sha in the file. A result of the same project, series,
    commit and occasion has the same uuid, whatever its value and whenever the file is imported.
    """
    records, refused = [], []
    places: dict[tuple[object, ...], _Place] = {}
    for result in reading.results:
        sha = None if result.commit is None else result.commit.sha
        key = (sha, result.created_at, result.occasion)
        try:
            if key not in places:
                places[key] = _place(result, reading, origin, commits or {})
            records.append(_record(result, origin, places[key]))
        except BadResult as error:
            refused.append(Refused(result.name, str(error)))
    return records, refused


def commit_in_file(result: ExternalResult, reading: Reading, origin: Origin) -> CommitInfo | None:
    """Return the commit of a result: its own, else the origin's, else the file's."""
    if result.commit is not None or origin.commit is not None or reading.commit is None:
        return result.commit or origin.commit
    return CommitInfo(reading.commit, None, None, dirty=False)


def is_future(time: str) -> bool:
    """Return True for an ISO 8601 time after now, by which results would follow all later ones."""
    return datetime.fromisoformat(time) > datetime.now(UTC) + _MAX_CLOCK_SKEW


def _place(
    result: ExternalResult, reading: Reading, origin: Origin, commits: Mapping[str, CommitInfo]
) -> _Place:
    named = commit_in_file(result, reading, origin)
    if named is None:
        raise BadResult("it names no commit: give --commit")
    commit = commits.get(named.sha, named)
    branch = commit.branch or origin.branch
    in_file = result.created_at or reading.created_at
    time = origin.time or in_file
    if time is not None and is_future(time):
        raise BadResult(f"its time is {time}, in the future: give --time")
    occasion = origin.occasion or result.occasion or reading.occasion or in_file or ""
    about: dict[str, Any] = {"occasion": occasion} if occasion else {}
    if time is None:
        about[TIME_OF_IMPORT] = True
    of_project = replace(commit, project=origin.project, branch=branch)
    identity = content_uuid(
        f"{EXTERNAL_BACKEND} {_VERSION} {origin.project} {commit.sha} {occasion}"
    )
    run = RunInfo(
        uuid=identity,
        suite=origin.project,
        trigger="import",
        status="complete",
        created_at=time or datetime.now(UTC).isoformat(),
        idempotency_key=identity,
    )
    return _Place(of_project, run, about)


def _record(result: ExternalResult, origin: Origin, at: _Place) -> Record:
    run = at.run
    remarks = {"remarks": list(result.remarks)} if result.remarks else {}
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
        created_at=run.created_at,
        run=run,
        commit=at.commit,
        device=_device(sku),
        environment=dict(result.environment),
        extra={**result.extra, **at.about, **remarks},
        project=origin.project,
        **{**UNTIMED, "sm_clock_mhz": result.sm_clock_mhz},
    )


@lru_cache(maxsize=1024)
def _device(sku: str) -> DeviceInfo:
    return DeviceInfo(uuid=f"{EXTERNAL_BACKEND} {sku}", sku=sku, backend=EXTERNAL_BACKEND)
