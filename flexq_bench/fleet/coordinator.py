"""The coordinator: leases jobs to workers, stores results, renews leases, requeues lost jobs.

All persistent state is in the database. Memory only holds which worker measures which job, so
another coordinator can continue with the open jobs if this one is killed.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

from flexq_bench.db import queries
from flexq_bench.db.dialects import database_time
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.errors import DatabaseError, FileMovedError
from flexq_bench.db.fleet import Beat, ComparisonOutcome, WorkerInfo
from flexq_bench.db.leases import COMPARE, MEASURE, OPEN_JOB_STATES, is_current
from flexq_bench.db.records import CommitInfo, Record, RunInfo
from flexq_bench.db.store import add_record
from flexq_bench.db.tuning import ChoiceInfo, choices_of
from flexq_bench.errors import FlexqError, InfrastructureError, one_line
from flexq_bench.fleet.backlog import Backlog, Job, Shape
from flexq_bench.fleet.compare_jobs import Compared, CompareJob, ComparisonWork
from flexq_bench.fleet.pool import OnCompared, Work
from flexq_bench.fleet.retry_policy import (
    MAX_DEATHS,
    comparison_quarantine,
    is_quarantined,
    quarantine_detail,
)
from flexq_bench.fleet.timeouts import Times
from flexq_bench.fleet.workers import Event, Finished, Joined, Lost, ReadyWorker, Workers
from flexq_bench.fleet.write_buffer import WriteBuffer
from flexq_bench.kernels.contract import Backend
from flexq_bench.measure import Measured
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.runs.lifecycle import OnRecord
from flexq_bench.runs.record import build_record
from flexq_bench.runs.worker import failed
from flexq_bench.workloads.case import Case

_MAX_POLL_S = 0.5  # longest wait for events: the maximum delay of heartbeats and timeouts
_REPORT_INTERVAL_S = 10.0  # of messages while workers are waited for
# Between two reads of the open jobs while another coordinator leases some of them.
_MIN_RELOAD_INTERVAL_S = 1.0
_RELOAD_FACTOR = 20  # plus so many times the duration of a read
_LEAST_BUDGET_S = 0.001  # of a comparison that is to measure nothing: its cases are undecided

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _WorkerState:
    """A ready worker and its job. is_stale: it still has a job whose run was stopped.

    choices_sent: the number of its kind's tuning choices that it has.
    """

    ready: ReadyWorker
    job: Job | None = None
    since: float = 0.0
    last: Shape | None = None
    is_stale: bool = False
    choices_sent: int = 0
    finished: int = 0
    measuring_s: float = 0.0
    temperature_c: float | None = None

    @property
    def is_idle(self) -> bool:
        return self.job is None and not self.is_stale


@dataclass(slots=True)
class _Kind:
    """The jobs for one SKU. missing_since: clock value since when it has no worker."""

    backlog: Backlog = field(default_factory=Backlog)
    missing_since: float | None = None


class Coordinator:
    """Assigns the jobs of runs to workers and stores their results.

    The jobs of one call measure or compare; before, workers of the other kind are replaced. Jobs
    are carried out by the number of GPUs that they need: those of one GPU first, then by workers
    with two, and so on. So no worker waits for a GPU that another one holds.
    commit: of the code that the workers run. on_record: called with each result after it is stored;
    its exceptions end the measurement. clock: seconds, monotonic.
    """

    def __init__(
        self,
        database: Database,
        workers: Workers,
        commit: CommitInfo,
        times: Times,
        *,
        on_record: OnRecord,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers, self._commit = workers, commit
        self._times, self._on_record, self._clock = times, on_record, clock
        self._buffer = WriteBuffer(database, times, clock=clock)
        self._states: dict[str, _WorkerState] = {}
        self._given_back: dict[str, ReadyWorker] = {}
        self._kind_of_jobs, self._gpus_of_jobs = MEASURE, 1
        self._gpus: dict[str, str] = {}  # kind of device by run
        self._works: dict[str, Work] = {}
        self._cases: dict[str, dict[str, Case]] = {}
        self._comparisons: dict[str, ComparisonWork] = {}
        self._began = 0.0  # of the comparisons
        self._on_compared: OnCompared = lambda job: None
        self._runs: dict[str, RunInfo] = {}
        self._kinds: dict[str, _Kind] = {}
        self._choices: dict[tuple[str, str], list[ChoiceInfo]] = {}
        self._returning: dict[int, tuple[Job, ReadyWorker, str]] = {}
        self._leased_elsewhere = False  # another coordinator leases jobs of these works
        self._backlog_is_stale = False  # another coordinator leased or finished some of its jobs
        self._drained: dict[str, str] = {}  # reasons by host or device
        self._next_beat = self._next_reload = self._next_report = 0.0

    @property
    def workers(self) -> tuple[ReadyWorker, ...]:
        """The workers that are ready, or that gave their devices back."""
        ready = {uuid: state.ready for uuid, state in self._states.items()}
        return tuple((self._given_back | ready).values())

    def gather(self, gpu: str = "") -> None:
        """Wait until every worker that is being started is ready or refused.

        gpu: only until one of this kind is ready; empty: all. Devices may be given back meanwhile.
        """
        self._take_back(w for w, ready in self._given_back.items() if gpu in ("", ready.gpu))
        self._next_report, poll_s = self._clock() + _REPORT_INTERVAL_S, 0.0
        while True:
            self._handle_all(self._workers.poll(poll_s))
            self._buffer.flush({}, self._due_beats())
            if any(state.ready.gpu == gpu for state in self._states.values()):
                return
            if not self._workers.arriving and self._buffer.is_settled:
                return
            self._report_waiting(gpu or f"{self._workers.arriving} devices")
            if self._workers.blocked:
                self._give_back_others({gpu})
            poll_s = _MAX_POLL_S

    def carry_out(self, works: Sequence[Work]) -> None:
        """Measure until each job of these runs has a result, or a reason for having none.

        Raises InfrastructureError if the database stays unavailable, and any exception of
        on_record. Unfinished measurements are then lost; their jobs become free when their leases
        expire.
        """
        self._works = {work.run.info.uuid: work for work in works}
        self._gpus = {uuid: work.gpu for uuid, work in self._works.items()}
        self._cases = {
            uuid: {case.key: case for case in work.cases} for uuid, work in self._works.items()
        }
        # Without the plan, of which every record of a run would otherwise hold a copy.
        self._runs = {uuid: replace(work.run.info, plan=()) for uuid, work in self._works.items()}
        for gpus in sorted({1} | {case.gpus for work in works for case in work.cases}):
            self.use(MEASURE, gpus)
            self._carry_out()
        if self._gpus_of_jobs > 1:  # the pool's kinds are those of workers with one
            self.use(MEASURE)
            self.gather()

    def compare(self, works: Sequence[ComparisonWork], on_compared: OnCompared) -> None:
        """Carry out the stored comparisons of these runs, as `carry_out` does.

        on_compared: called with each job that has an outcome, after this is stored.
        """
        self._works, self._runs = {}, {}
        self._gpus = {work.run: work.gpu for work in works}
        self._comparisons = {work.run: work for work in works}
        self._began, self._on_compared = self._clock(), on_compared
        for gpus in sorted({1} | self._gpus_of_comparisons()):
            self.use(COMPARE, gpus)
            self._carry_out()
        if self._gpus_of_jobs > 1:
            self.use(COMPARE)
            self.gather()

    def _gpus_of_comparisons(self) -> set[int]:
        select = partial(queries.jobs_of, states=OPEN_JOB_STATES, kind=COMPARE)
        rows = (self._buffer.read(partial(select, run_uuid=run)) for run in self._comparisons)
        jobs = (CompareJob.from_data(row.content or {}) for of_run in rows for row in of_run or ())
        return {job.gpus for job in jobs}

    def use(self, kind: str, gpus: int = 1) -> None:
        """Replace the workers by those for jobs of this kind on so many GPUs."""
        if (kind, gpus) != (self._kind_of_jobs, self._gpus_of_jobs):
            self._workers.use(kind, gpus)
            self._given_back.clear()
            self._kind_of_jobs, self._gpus_of_jobs = kind, gpus
            self._handle_all(self._workers.poll(0.0))

    def _carry_out(self) -> None:
        self._kinds = {gpu: _Kind() for gpu in self._gpus.values()}
        try:
            self._read_drains()
            self._reload_backlog()
            self._exchange()  # before the first wait, so that ready workers start at once
            while not self._is_done():
                self._share_devices()
                self._handle_all(self._workers.poll(_MAX_POLL_S))
                self._end_overdue()
                self._give_up_on_missing_kinds()
                self._exchange()
                if self._must_reload:
                    self._reload_backlog()
        except BaseException:
            self._abort()
            raise

    def memory_obstacles(self, gpu: str, cases: Sequence[Case]) -> Mapping[str, str]:
        """Reasons, by key, why cases don't fit the memory of this kind of GPU.

        Empty if it has no worker. If the queried worker is lost, another one is queried; raises
        InfrastructureError after MAX_DEATHS lost workers.
        """
        for deaths in range(1, MAX_DEATHS + 1):
            self.gather(gpu)
            uuids = (uuid for uuid, state in self._states.items() if state.ready.gpu == gpu)
            worker = next(uuids, None)
            if worker is None:
                break
            try:
                return self._workers.memory_obstacles(worker, cases)
            except InfrastructureError:
                if deaths == MAX_DEATHS:
                    raise
        return {}

    def mark_stopped(self) -> None:
        """Mark every worker as stopped regularly."""
        self._buffer.flush({}, self._beats())
        for uuid in self._states:
            self._buffer.end_worker(uuid, "")
        self._states.clear()
        self._buffer.flush({}, ())

    def _handle_all(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Joined):
                self._register(event.worker)
            elif isinstance(event, Finished):
                self._store_result(event)
            else:
                self._remove(event)

    def _register(self, ready: ReadyWorker) -> None:
        worker = ready.worker
        self._states[ready.uuid] = _WorkerState(ready)
        host = worker.environment.get("host", "")
        self._buffer.add_worker(
            WorkerInfo(ready.uuid, host, worker.pid, worker.device, worker.environment)
        )
        log.info("%s on %s joined", ready.gpu, host, extra={"worker": ready.uuid})

    def _store_result(self, event: Finished) -> None:
        state = self._states[event.worker]
        if not isinstance(event.answer, Compared):
            self._add_choices(state.ready, event.answer.choices)
        if state.job is None:
            state.is_stale = False
            return
        job, state.job = state.job, None
        state.finished += 1
        state.measuring_s += self._clock() - state.since
        if isinstance(event.answer, Compared):
            self._store_comparison(job, state.ready, event.answer)
            return
        state.temperature_c = event.answer.measured.temperature_c
        if isinstance(job.task, Case):
            record = self._record(job, job.task, state.ready, event.answer.measured)
            self._buffer.add_result(job.id, record)

    def _store_comparison(self, job: Job, ready: ReadyWorker, compared: Compared) -> None:
        outcome = compared.outcome(ready.worker.device)
        if outcome is not None:
            self._buffer.add_outcome(job.id, outcome)
        elif compared.error is not None:
            self._return(job, ready, one_line(compared.error), death=True)

    def _return(self, job: Job, ready: ReadyWorker, reason: str, *, death: bool) -> None:
        self._buffer.return_job(job.id, reason, death=death)
        self._returning[job.id] = job, ready, reason

    def _record(self, job: Job, case: Case, ready: ReadyWorker, measured: Measured) -> Record:
        return build_record(
            case,
            measured,
            self._runs[job.run],
            self._commit,
            ready.worker.device,
            ready.worker.environment,
            job.attempt,
            repetition=job.repetition,
        )

    def _add_choices(self, ready: ReadyWorker, choices: Sequence[ChoiceInfo]) -> None:
        if choices:
            self._choices_for(ready).extend(choices)
            self._buffer.add_choices(choices)

    def _choices_for(self, ready: ReadyWorker) -> list[ChoiceInfo]:
        """The choices for this worker's kind of GPU and software versions; read once."""
        key = (ready.gpu, ready.software)
        if key not in self._choices:
            stored = self._buffer.read(lambda session: choices_of(session, *key))
            if stored is None:
                return []
            self._choices[key] = stored
        return self._choices[key]

    def _remove(self, event: Lost) -> None:
        state = self._states.pop(event.worker)
        self._buffer.end_worker(event.worker, event.reason)
        if not event.reason:
            return
        job = state.job
        log.warning(
            "a worker of %s is lost: %s",
            state.ready.gpu,
            event.reason,
            extra={"worker": event.worker, "job": job.id if job else None},
        )
        if job is not None:
            self._return(job, state.ready, event.reason, death=not event.blameless)

    def _end_overdue(self) -> None:
        now = self._clock()
        for state in self._states.values():
            if state.job is None and not state.is_stale:
                continue
            # The first job of a process includes compilation.
            usual = self._times.compare if self._kind_of_jobs == COMPARE else self._times.case
            limit = usual + (0.0 if state.finished else self._times.start)
            if now - state.since > limit:
                state.since = now
                self._workers.end(state.ready.uuid, f"no result after {limit:.0f} s: it hangs")

    def _give_up_on_missing_kinds(self) -> None:
        now = self._clock()
        present = {s.ready.gpu for s in self._states.values() if not self._is_drained(s)}
        for gpu, kind in self._kinds.items():
            if gpu in present or not kind.backlog:
                kind.missing_since = None
            elif kind.missing_since is None:
                kind.missing_since = now
                if not self._workers.arriving:
                    log.warning("no %s is there: %d jobs wait for one", gpu, len(kind.backlog))
            elif now - kind.missing_since > self._times.device and not self._workers.arriving:
                if self._is_leased_elsewhere(gpu):
                    kind.missing_since = now
                    self._leased_elsewhere = self._backlog_is_stale = True
                    continue
                wanted = (
                    f"no {gpu}"
                    if self._gpus_of_jobs == 1
                    else f"no host with {self._gpus_of_jobs} {gpu}"
                )
                reason = self._drain_of(gpu) or f"{wanted} came within {self._times.device:.0f} s"
                for run, gpu_of_run in self._gpus.items():
                    if gpu_of_run == gpu:
                        self._buffer.abandon_jobs(run, reason)
                kind.backlog, kind.missing_since = Backlog(), None

    def _share_devices(self) -> None:
        """Take back the devices that jobs wait for; give others back if some are still missing."""
        wanted = {gpu for gpu, kind in self._kinds.items() if kind.backlog}
        self._take_back(w for w, ready in self._given_back.items() if ready.gpu in wanted)
        missing = [gpu for gpu in wanted if self._kinds[gpu].missing_since is not None]
        if missing:
            self._report_waiting(", ".join(sorted(missing)))
            self._give_back_others(wanted)

    def _report_waiting(self, devices: str) -> None:
        if self._clock() >= self._next_report:
            self._next_report = self._clock() + _REPORT_INTERVAL_S
            blocked = self._workers.blocked
            level = logging.WARNING if blocked else logging.INFO
            others = f"; others use {blocked} devices" if blocked else ""
            log.log(level, "waiting for %s%s", devices, others)

    def _give_back_others(self, wanted: Collection[str]) -> None:
        """Give back idle devices of all kinds but these.

        Another coordinator may wait for them, and hold those that this one waits for.
        """
        for uuid, state in self._states.items():
            if state.is_idle and state.ready.gpu not in wanted and uuid not in self._given_back:
                log.info("%s is given back: it has no jobs yet", state.ready.gpu)
                self._given_back[uuid] = state.ready
                self._workers.give_back(uuid)

    def _take_back(self, workers: Iterable[str]) -> None:
        uuids = set(workers)
        if uuids:
            self._workers.take_back(uuids)
        self._given_back = {w: ready for w, ready in self._given_back.items() if w not in uuids}

    def _read_drains(self) -> None:
        stored = self._buffer.read(queries.drains)
        if stored is not None:
            self._drained = {row.target: row.reason for row in stored}

    def _is_drained(self, state: _WorkerState) -> bool:
        return not self._drained.keys().isdisjoint(state.ready.places)

    def _drain_of(self, gpu: str) -> str:
        """Return that all devices of a kind are drained, with a reason; empty: they are not."""
        of_kind = [state.ready for state in self._states.values() if state.ready.gpu == gpu]
        places = (place for ready in of_kind for place in ready.places)
        reasons = [self._drained[place] for place in places if place in self._drained]
        return f"every {gpu} is drained ({reasons[0]})" if reasons else ""

    def _is_leased_elsewhere(self, gpu: str) -> bool:
        """Return True if another coordinator's worker has a job of these runs on this kind."""
        runs = [run for run, kind in self._gpus.items() if kind == gpu]

        def is_leased(session: Session) -> bool:
            now, lease = database_time(session), timedelta(seconds=self._times.lease)
            return any(
                job.worker not in self._states and is_current(job.lease_until, now, lease)
                for run in runs
                for job in queries.jobs_of(
                    session, run, states=("leased",), kind=self._kind_of_jobs
                )
            )

        return self._buffer.read(is_leased) is not False  # None: the database is unavailable

    def _exchange(self) -> None:
        assignments = self._assign_jobs()
        claims = {job.id: state.ready.uuid for state, job in assignments}
        flushed = self._buffer.flush(claims, self._due_beats(), own_workers=self._states.keys())
        for state, job in assignments:
            attempt = None if flushed is None else flushed.claimed.get(job.id)
            if attempt is not None:
                self._start(state, job.with_attempt(attempt))
            elif flushed is None:
                self._kinds[state.ready.gpu].backlog.put_back(job)
            else:
                self._leased_elsewhere = self._backlog_is_stale = True
        if flushed is None:
            return
        for record in flushed.stored.values():
            self._on_record(record)
        for compared in flushed.compared:
            self._on_compared(compared)
        for job_id, deaths in flushed.deaths.items():
            self._requeue(*self._returning.pop(job_id), deaths)

    def _assign_jobs(self) -> list[tuple[_WorkerState, Job]]:
        """Return idle workers and their next jobs."""
        devices: dict[str, set[str]] = defaultdict(set)
        busy: dict[str, set[Shape]] = defaultdict(set)
        for state in self._states.values():
            if not self._is_drained(state):
                devices[state.ready.gpu].add(state.ready.device)
            if state.job is not None:
                busy[state.ready.gpu].add(state.job.shape)
        assignments = []
        idle = [
            (state, self._kinds[state.ready.gpu])
            for state in self._states.values()
            if state.is_idle and state.ready.gpu in self._kinds and not self._is_drained(state)
        ]
        # Workers that continue their shape come first, so that no other worker takes its last jobs.
        idle.sort(key=lambda pair: not pair[1].backlog.has(pair[0].last))
        for state, kind in idle:
            gpu = state.ready.gpu
            job = kind.backlog.take(
                state.ready.device, state.last, busy[gpu], devices=len(devices[gpu])
            )
            if job is not None:
                busy[gpu].add(job.shape)
                assignments.append((state, job))
        return assignments

    def _start(self, state: _WorkerState, job: Job) -> None:
        state.job, state.since, state.last = job, self._clock(), job.shape
        log.info(
            "%s, attempt %d, on %s",
            job.name,
            job.attempt,
            state.ready.gpu,
            extra={"run": job.run, "job": job.id, "worker": state.ready.uuid},
        )
        if isinstance(job.task, CompareJob):
            work = self._comparisons[job.run]
            rules = self._rules_from_now(work.rules)
            self._workers.compare(state.ready.uuid, job.task, work.repository, rules)
            return
        choices = self._choices_for(state.ready)
        new_choices, state.choices_sent = choices[state.choices_sent :], len(choices)
        self._workers.start(state.ready.uuid, job.task, new_choices)

    def _rules_from_now(self, rules: InterleaveRules | None) -> InterleaveRules | None:
        """The rules of a comparison that starts now: what is left of the budget of all."""
        if rules is None or rules.budget_s is None:
            return rules
        left_s = rules.budget_s - (self._clock() - self._began)
        return replace(rules, budget_s=max(left_s, _LEAST_BUDGET_S))

    def _requeue(self, job: Job, ready: ReadyWorker, reason: str, deaths: int) -> None:
        if not is_quarantined(deaths):
            self._kinds[ready.gpu].backlog.put_back(job)
            return
        comparing = isinstance(job.task, CompareJob)
        detail = comparison_quarantine(deaths, reason) if comparing else quarantine_detail(deaths)
        log.warning("%s is %s", job.name, detail, extra={"run": job.run, "job": job.id})
        if isinstance(job.task, CompareJob):
            self._buffer.add_outcome(job.id, ComparisonOutcome("quarantined", detail))
            return
        device = ready.worker.device
        backend: Backend = "cuda" if device.backend == "cuda" else "cpu"
        measured = failed(job.task, detail, backend=backend, seed=0)
        record = self._record(job, job.task, ready, measured)
        self._buffer.add_result(job.id, record, quarantined=True)

    def _due_beats(self) -> list[Beat]:
        if self._clock() < self._next_beat:
            return []
        self._read_drains()
        self._next_beat = self._clock() + self._times.beat
        return self._beats()

    def _beats(self) -> list[Beat]:
        return [
            Beat(
                uuid,
                state.job.name if state.job else None,
                state.temperature_c,
                state.finished,
                state.measuring_s,
                state.job.id if state.job else None,
            )
            for uuid, state in self._states.items()
        ]

    @property
    def _must_reload(self) -> bool:
        return (
            self._leased_elsewhere
            and self._clock() >= self._next_reload
            # Otherwise each job that another coordinator finished would cost an exchange.
            and (self._backlog_is_stale or not any(kind.backlog for kind in self._kinds.values()))
        )

    def _reload_backlog(self) -> None:
        """Read the open jobs; those without a lease become the backlog."""
        began = self._clock()
        self._next_reload = began + _MIN_RELOAD_INTERVAL_S
        own_jobs = {state.job.id for state in self._states.values() if state.job}
        own_jobs |= self._returning.keys() | self._buffer.unwritten_jobs
        now = self._buffer.read(database_time)
        waiting: dict[str, list[Job]] = {gpu: [] for gpu in self._kinds}
        self._leased_elsewhere = self._backlog_is_stale = False
        for uuid, gpu in self._gpus.items():
            rows = self._buffer.read(
                partial(
                    queries.jobs_of,
                    run_uuid=uuid,
                    states=OPEN_JOB_STATES,
                    kind=self._kind_of_jobs,
                )
            )
            if rows is None or now is None:
                self._leased_elsewhere = True  # unknown, so read again
                return
            for row in rows:
                task: Case | CompareJob = (
                    self._cases[uuid][row.case_key]
                    if row.content is None
                    else CompareJob.from_data(row.content)
                )
                if row.id in own_jobs or task.gpus != self._gpus_of_jobs:
                    continue
                is_leased = is_current(row.lease_until, now, timedelta(seconds=self._times.lease))
                if is_leased and row.worker not in self._states:
                    self._leased_elsewhere = True
                    continue
                expected, device = row.expected_s or 0.0, row.device or ""
                waiting[gpu].append(
                    Job(row.id, uuid, task, row.repetition, expected, device=device)
                )
        for gpu, jobs in waiting.items():
            self._kinds[gpu].backlog = Backlog(jobs)
        # Reading 100,000 jobs takes long.
        self._next_reload += _RELOAD_FACTOR * (self._clock() - began)

    def _is_done(self) -> bool:
        running = any(state.job for state in self._states.values())
        waiting = any(kind.backlog for kind in self._kinds.values())
        unsettled = self._returning or self._leased_elsewhere or not self._buffer.is_settled
        return not (running or waiting or unsettled)

    def _abort(self) -> None:
        """Return the leased jobs, so that they are free before their leases expire."""
        for state in self._states.values():
            if state.job is not None:
                self._buffer.return_job(state.job.id, "the run was stopped", death=False)
                state.job, state.is_stale = None, True
        self._returning.clear()
        try:
            self._buffer.flush({}, ())
        except FileMovedError:  # the results are written to a file when the run ends
            for record in self._buffer.unwritten_records:
                run = self._works[record.run.uuid].run
                run.unwritten.append(partial(add_record, record=record))
        except (DatabaseError, FlexqError):
            pass  # must not hide the exception that ended the run
