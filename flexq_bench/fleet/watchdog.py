"""Detection of runs, nightly runs and requests that are stalled, for how long and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from flexq_bench.db import queries
from flexq_bench.db.dialects import database_time
from flexq_bench.db.engine import Session
from flexq_bench.db.leases import COMPARE, MEASURE, UNFINISHED_JOB_STATES
from flexq_bench.runs.owner_process import is_dead

# Twice the time limit of a case (flexq_bench.fleet.timeouts).
MIN_STALL_S = 600.0
MIN_COMPARING_STALL_S = 3600.0  # nothing is stored until a part of the cases is compared
_MAX_SILENCE_S = 120.0  # twelve heartbeats of a worker


@dataclass(frozen=True, slots=True)
class Stall:
    """A run, night or request without progress. what: its kind. seconds: time without progress."""

    what: str
    name: str
    seconds: float
    reason: str

    @property
    def line(self) -> str:
        minutes = self.seconds / 60
        span = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
        return f"{self.what} {self.name} has been stalled for {span}: {self.reason}"


def stalls(session: Session) -> list[Stall]:
    """Runs, nights and requests that are stalled, the longest first."""
    now = database_time(session)
    stalled = [*_runs(session, now), *_nights(session, now), *_requests(session, now)]
    return sorted(stalled, key=lambda stall: -stall.seconds)


def _runs(session: Session, now: datetime) -> Iterator[Stall]:
    running = queries.owned_runs(session)
    newest = queries.last_results(session, [run.uuid for run in running])
    progress_by_run = {row.run: row for row in queries.progress(session)}
    comparing = queries.comparison_states(session, [run.uuid for run in running])
    for run in running:
        idle_s = (now - newest.get(run.uuid, run.created_at)).total_seconds()
        dead = run.owner is not None and is_dead(run.owner)
        limit_s = MIN_COMPARING_STALL_S if run.uuid in comparing else MIN_STALL_S
        if idle_s < limit_s and not dead:
            continue
        if dead and run.owner is not None:
            reason = f"its process {run.owner.pid} on {run.owner.host} is dead (status --reap)"
        elif run.uuid in progress_by_run:
            reason = _stall_reason(session, now, progress_by_run[run.uuid])
        else:
            owner = (
                "an unknown process"
                if run.owner is None
                else (f"process {run.owner.pid} on {run.owner.host}")
            )
            reason = f"{owner} has stored nothing since"
        yield Stall("run", f"{run.uuid[:8]} {run.suite}", max(idle_s, 0.0), reason)


def _stall_reason(session: Session, now: datetime, run: queries.Progress) -> str:
    workers = queries.workers(session, live=True)
    if not workers:
        return f"{run.open} jobs wait and no worker is alive"
    silent = [
        worker for worker in workers if (now - worker.heartbeat_at).total_seconds() > _MAX_SILENCE_S
    ]
    if len(silent) == len(workers):
        worst = min(silent, key=lambda worker: worker.heartbeat_at)
        seconds = (now - worst.heartbeat_at).total_seconds()
        return f"worker {worst.uuid[:8]} on {worst.host} is silent for {seconds:.0f} s"
    busy = [worker for worker in workers if worker.case_key is not None]
    if busy:
        return f"worker {busy[0].uuid[:8]} on {busy[0].host} is still in {busy[0].case_key}"
    return f"{run.open} jobs wait and {len(workers)} workers are idle"


def _nights(session: Session, now: datetime) -> Iterator[Stall]:
    nights = queries.unfinished_nights(session)
    owner_of = {
        run.uuid: run.owner for run in queries.owned_runs(session, [night.run for night in nights])
    }
    for night in nights:
        idle_s, owner = (now - night.updated_at).total_seconds(), owner_of.get(night.run)
        # Another process may go on with it, and then leases its jobs.
        is_left = (
            owner is not None and is_dead(owner) and not queries.leased_jobs(session, night.run)
        )
        if idle_s < (_MAX_SILENCE_S if is_left else MIN_COMPARING_STALL_S):
            continue
        kind = MEASURE if night.state == "measuring" else COMPARE
        jobs = queries.jobs_of(session, night.run, states=UNFINISHED_JOB_STATES, kind=kind)
        reasons = ", ".join(dict.fromkeys(job.reason for job in jobs if job.reason))
        reason = (
            f"{'its process is dead, ' if is_left else ''}it is {night.state} at "
            f"{night.commit[:10]}, {len(jobs)} jobs wait"
            f"{f' ({reasons})' if reasons else ''} (nightly --resume {night.run[:8]}, or the next "
            "night)"
        )
        yield Stall("night", f"{night.name} on {night.gpu}", idle_s, reason)


def _requests(session: Session, now: datetime) -> Iterator[Stall]:
    alive = {worker.gpu for worker in queries.workers(session, live=True)}
    for row in queries.requests(session, states=("queued",)):
        idle_s = (now - row.created_at).total_seconds()
        if idle_s < MIN_STALL_S:
            continue
        served = alive if not row.gpu else alive & {row.gpu}
        kind = f" on {row.gpu}" if row.gpu else ""
        reason = (
            "its workers have others before it"
            if served
            else f"no worker is alive{kind} (flexq-bench worker)"
        )
        yield Stall("request", f"{row.uuid[:8]} of {row.requester}", idle_s, reason)
