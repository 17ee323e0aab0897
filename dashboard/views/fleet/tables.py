"""Table rows of the fleet: workers, runs, jobs, requests and devices."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, tzinfo
from typing import Any

from flexq_bench.dashboard.shared.formatting import as_age, in_gib, local_time
from flexq_bench.db.leases import LIVE_WORKER_STATES
from flexq_bench.db.queries import DeviceRow, JobRow, Progress, RequestRow, WorkerRow

SILENT_AFTER = timedelta(minutes=2)  # many times the heartbeat interval


def is_silent(worker: WorkerRow, now: datetime) -> bool:
    """Return True if the worker should be alive and its last heartbeat is too old."""
    return worker.state in LIVE_WORKER_STATES and now - worker.heartbeat_at > SILENT_AFTER


def has_ended(worker: WorkerRow, now: datetime, recent: timedelta) -> bool:
    """Return True if the worker ended, or its last heartbeat is older than `recent`."""
    return worker.state not in LIVE_WORKER_STATES or now - worker.heartbeat_at > recent


def is_abandoned(run: Progress, now: datetime, recent: timedelta) -> bool:
    """Return True if an unfinished run is older than `recent` and none of its jobs is leased."""
    return now - run.created_at > recent and not run.states.get("leased")


def worker_rows(workers: Sequence[WorkerRow], now: datetime, zone: tzinfo) -> list[dict[str, Any]]:
    return [
        {
            "host": worker.host,
            "GPU": worker.gpu,
            "device": worker.device,
            "state": "silent" if is_silent(worker, now) else worker.state,
            "measures": worker.case_key or "",
            "°C": worker.temperature_c,
            "last seen": local_time(worker.heartbeat_at, zone),
            "ago": as_age(now - worker.heartbeat_at),
            "lease until": local_time(worker.lease_until, zone) if worker.lease_until else "",
            "jobs done": worker.finished,
            "measuring, h": worker.measuring_s / 3600,
            "why": worker.detail,
            "worker": worker.uuid[:8],
        }
        for worker in workers
    ]


def progress_rows(runs: Sequence[Progress], zone: tzinfo) -> list[dict[str, Any]]:
    return [
        {
            "run": run.run[:8],
            "suite": run.suite,
            "run is": run.status,
            "ended, %": 100 * (run.total - run.open) / run.total if run.total else None,
            "jobs": run.total,
            **{state: run.states.get(state, 0) for state in ("queued", "leased", "done")},
            "quarantined": run.states.get("quarantined", 0),
            "no device": run.states.get("no-device", 0),
            "left, GPU min": run.expected_s / 60,
            "without estimate": run.unknown,
            "started": local_time(run.created_at, zone),
        }
        for run in runs
    ]


def quarantine_rows(jobs: Sequence[tuple[str, JobRow]]) -> list[dict[str, Any]]:
    return [
        {
            "case": job.case_key,
            "worker deaths": job.deaths,
            "attempts": job.attempts,
            "why": job.reason,
            "run": run[:8],
        }
        for run, job in jobs
    ]


def request_rows(requests: Sequence[RequestRow], zone: tzinfo) -> list[dict[str, Any]]:
    return [
        {
            "request": row.uuid[:8],
            "kind": row.kind,
            "by": row.requester,
            "GPU": row.gpu or "any",
            "state": row.state,
            "cases": row.cases,
            "requested": local_time(row.created_at, zone),
            "run": row.run[:8] if row.run else "",
            "why": row.detail,
        }
        for row in requests
    ]


def device_rows(devices: Sequence[DeviceRow], zone: tzinfo) -> list[dict[str, Any]]:
    return [
        {
            "GPU": row.sku,
            "device": row.uuid,
            "last seen": local_time(row.last_seen, zone) if row.last_seen else "by no worker",
            "compute capability": row.compute_capability or "",
            "memory, GiB": in_gib(row.memory_bytes),
            "power limit, W": row.power_limit_w,
            "ECC": row.ecc,
            "MIG": row.mig,
            "vBIOS": row.vbios or "",
        }
        for row in devices
    ]
