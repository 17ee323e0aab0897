"""Nightly run: measure the newest commit on every kind of GPU, confirm candidates, store verdicts.

| state of a night  | what follows                                                                 |
| ----------------- | ---------------------------------------------------------------------------- |
| measuring         | its missing cases are measured; without its kind of GPU it stays so          |
| comparing         | its comparisons are chosen once and stored as jobs; those without an outcome |
|                   | are carried out, of all kinds of GPU at the same time; it is judged          |
| done              | every comparison has an outcome: its report does not change                  |

Each step stores its state in the database, so an interrupted night is resumed, and one that is done
is not repeated. A night whose comparisons had no GPU is judged by the others, stays in comparing,
and is continued by later nights.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexq_bench.ci.candidates import Suspects, planned_comparisons, suspects_of
from flexq_bench.ci.change_points import LookedBack, store_change_points
from flexq_bench.ci.notifications import events
from flexq_bench.ci.report_data import MAX_CANDIDATES, KindReport, NightOutcome
from flexq_bench.db import queries
from flexq_bench.db.dialects import lock_for_writing
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.fleet import JobInfo, add_jobs, reopen_comparisons
from flexq_bench.db.leases import COMPARE, OPEN_JOB_STATES, UNFINISHED_JOB_STATES
from flexq_bench.db.nightly import NightInfo, set_night
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.errors import FlexqError, UsageError, one_line
from flexq_bench.fleet.compare_jobs import (
    CompareJob,
    ComparisonWork,
    job_infos,
    stored_comparisons,
)
from flexq_bench.fleet.pool import OnCompared, Pool, Work
from flexq_bench.repository.provenance import commit_at
from flexq_bench.runs.lifecycle import OnRecord, OpenRun, new_run, open_run
from flexq_bench.runs.machine import Machine
from flexq_bench.runs.plan import build_plan
from flexq_bench.verdicts import Judged
from flexq_bench.verdicts.nightly import Night, record_night
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.suite import Suite

if TYPE_CHECKING:
    from flexq_bench.kernels.contract import Backend

_RECENT_NIGHTS = 14  # a kind of GPU that took part within these nights is expected

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rules:
    """Options of a nightly run.

    repository None: no git tree, so nothing can be confirmed. canaries: cases per night and kind of
    GPU that compare the commit with itself. candidates: most comparisons per night and kind of
    outliers, of creeping series, and of series that may be fixed. alerting: True on the branch
    whose changes open alerts. options: of the command, to store with the runs.
    """

    night: str
    repository: Path | None
    canaries: int = 2
    candidates: int = MAX_CANDIDATES
    alerting: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


def night_key(night: str, suite: str, gpu: str, commit: CommitInfo) -> str:
    """Return the key of a night on a kind of GPU; each commit of a day has its own."""
    changed = " with changes" if commit.dirty else ""
    return f"nightly {night} {suite} {gpu} {commit.sha}{changed}"


def measure_night(
    database: Database,
    pool: Pool,
    suite: Suite,
    commit: CommitInfo,
    rules: Rules,
    *,
    progress: Callable[[int], AbstractContextManager[OnRecord]],
) -> list[NightInfo]:
    """Measure the missing cases of the night on every available kind of GPU; return its nights.

    progress: takes the number of cases, yields a callback for each result.

    A kind that is done at this commit is skipped. For kinds that took part in earlier nights and
    are now unavailable, a run without a device is stored; their nights come last.
    """
    planned: list[Work] = []
    nights: list[NightInfo] = []
    kinds = pool.kinds  # read once: a kind that is lost during the run still counts as present
    with ExitStack() as runs:
        for kind in kinds:
            key = night_key(rules.night, suite.name, kind.gpu, commit)
            known = _stored(database, key)
            if known is not None and known.state != "measuring":
                nights.append(_info(known))
                continue
            plan = build_plan(suite, kind.backend, kind.capability)
            named = replace(new_run(suite.name, "nightly", plan.keys), idempotency_key=key)
            run = runs.enter_context(open_run(database, named, commit, rules.options))
            info = NightInfo(key, rules.night, suite.name, kind.gpu, run.info.uuid)
            if known is None:
                _set_state(database, info, "measuring")
            nights.append(info)
            missing = _missing(run)
            planned.append(
                Work(run, kind.gpu, tuple(case for case in plan.cases if case.key in missing))
            )
        if left := [work for work in planned if work.cases]:
            with progress(sum(len(work.cases) for work in left)) as on_record:
                pool.measure(left, on_record)
    measured = {work.run.info.uuid for work in planned}
    for info in nights:
        if info.run in measured:
            # Not a night that another process has continued meanwhile.
            _set_state(database, info, "comparing", after="measuring")
    present = {kind.gpu for kind in kinds}
    return nights + _store_absent_kinds(database, pool, suite, commit, rules, present)


def conclude_nights(
    database: Database,
    pool: Pool,
    nights: Sequence[NightInfo],
    commit: CommitInfo,
    rules: Rules,
    *,
    progress: Callable[[int], AbstractContextManager[OnCompared]],
) -> list[KindReport]:
    """Compare candidates and canaries; store verdicts, change points and reports.

    progress: takes the number of jobs, yields a callback for each outcome. Earlier nights of the
    suite that lack comparisons on a kind that is here come first. The stored report of a night that
    is done is returned.
    """
    devices = {kind.gpu: kind.devices for kind in pool.kinds}
    tonight = {info.key: info for info in nights}
    commits = dict.fromkeys(tonight, commit)
    waiting, last_tries = [], set()
    for stalled, is_recent in _stalled_nights(database, nights, commit):
        obstacle = f"{stalled.gpu} is not available now" if stalled.gpu not in devices else ""
        if rules.repository is None:
            waiting.append((stalled, "there is no git tree here"))
            continue
        try:
            commits[stalled.key] = _commit_of(rules, commit, stalled.commit)
        except FlexqError as error:  # the history was rewritten
            waiting.append((stalled, one_line(error)))
            continue
        if obstacle and is_recent:
            waiting.append((stalled, obstacle))
            continue
        if not is_recent:
            last_tries.add(stalled.key)
        nights = (_info(stalled), *nights)
    works: list[ComparisonWork] = []
    for info in nights:
        if not _is_comparing(database, info):
            continue  # it is done, or without its kind of GPU
        _plan(database, info, commits[info.key], rules, devices.get(info.gpu, 1))
        if rules.repository is not None and (info.gpu in devices or info.key in tonight):
            works.append(ComparisonWork(info.run, info.gpu, rules.repository))
    if jobs := _reopen(database, works):
        with progress(jobs) as on_compared:
            pool.compare(works, on_compared)
    reports = []
    for info in nights:
        at, is_last_try = commits[info.key], info.key in last_tries
        try:
            reports.append(_conclude(database, pool, info, at, rules, is_last_try=is_last_try))
        except FlexqError as error:  # for example a commit that git can't read
            reports.append(_not_judged(database, info, at, error))
    return [*_with_notes(reports, waiting), *_of_refused_gpus(pool, reports, commit)]


def rejudge_night(database: Database, name: str, *, alerting: bool) -> list[KindReport]:
    """Judge the stored comparisons of a night again, on every kind of GPU, and store its reports.

    Verdicts by the same version of the rules stay as they are; those of earlier versions stay
    stored beside the new ones. Raises UsageError if no night of this name was judged.
    """
    with database.session() as session:
        nights = [night for night in queries.night_states(session) if night.name == name]
        judged = [night for night in nights if night.state == "done" and night.report]
        commits = {
            night.key: queries.commit_info(session, night.commit, night.project) for night in judged
        }
    if not judged:
        raise UsageError(f"no night {name} was judged: `flexq-bench status` lists those stored")
    rules = Rules(name, None, alerting=alerting)
    reports = []
    for night in judged:
        commit = commits[night.key]
        assert commit is not None  # that of its run
        budget = int(night.report.get("budget", rules.candidates))
        at = replace(rules, candidates=budget)
        reports.append(
            _conclude(database, None, _info(night), commit, at, is_last_try=True, again=True)
        )
    return reports


def _is_comparing(database: Database, info: NightInfo) -> bool:
    stored = _stored(database, info.key)
    return stored is not None and stored.state == "comparing"


def _stalled_nights(
    database: Database, nights: Sequence[NightInfo], commit: CommitInfo
) -> list[tuple[queries.NightState, bool]]:
    """Return earlier nights whose comparisons are not finished, and whether each is recent.

    The latest comes first. They are of the same suite, of commits without local changes.
    """
    if not nights:
        return []
    suite, keys = nights[0].suite, {info.key for info in nights}
    with database.session() as session:
        stalled = queries.night_states(
            session, suite=suite, project=commit.project, state="comparing"
        )
        recent = _recent_nights(session, suite, commit)
    names = {night.name for night in recent}
    return [
        (night, night.name in names)
        for night in stalled
        if night.key not in keys and not night.dirty
    ]


def _recent_nights(session: Session, suite: str, commit: CommitInfo) -> list[queries.NightState]:
    """Return the latest nights of a suite and project, on all kinds of GPU."""
    nights = queries.night_states(
        session, suite=suite, project=commit.project, limit=_RECENT_NIGHTS * 10
    )
    names = sorted({night.name for night in nights}, reverse=True)[:_RECENT_NIGHTS]
    return [night for night in nights if night.name in names]


def _plan(
    database: Database, info: NightInfo, commit: CommitInfo, rules: Rules, devices: int
) -> None:
    """Choose the comparisons of a night, unless this was done, and store them as jobs.

    devices: of its kind of GPU, which share the cases.
    """
    with database.session() as session:
        lock_for_writing(session.connection())
        [stored] = queries.night_states(session, key=info.key)
        if stored.plan is not None:
            return
        waiting = _nights_waited(session, info, commit)
        suspects = suspects_of(session, info.run, commit, waiting)
        notes = []
        if rules.repository is None:
            notes.append("no git tree here: nothing was confirmed")
        elif commit.dirty:
            notes.append(
                "the tree has local changes or new files (git status): nothing was confirmed"
            )
        pairs = (
            ()
            if notes
            else planned_comparisons(
                session,
                suspects,
                commit,
                budget=rules.candidates,
                canaries=rules.canaries,
                seed=info.key,
            )
        )
        jobs = [CompareJob(base, head, tuple(cases), commit.project) for base, head, cases in pairs]
        add_jobs(session, info.run, job_infos(jobs, devices))
        plan = {
            "candidates": suspects.candidates,
            "not_compared": _not_compared(suspects, waiting, rules),
            "notes": notes,
        }
        set_night(session, info, stored.state, plan=plan, at=datetime.now(UTC))


def _reopen(database: Database, works: Sequence[ComparisonWork]) -> int:
    """Queue comparisons that had no device; return the number of those without an outcome."""
    count = 0
    for work in works:
        with database.session() as session:
            reopen_comparisons(session, work.run)
            rows = queries.jobs_of(session, work.run, states=OPEN_JOB_STATES, kind=COMPARE)
            count += len(rows)
    return count


def _conclude(
    database: Database,
    pool: Pool | None,
    info: NightInfo,
    commit: CommitInfo,
    rules: Rules,
    *,
    is_last_try: bool,
    again: bool = False,
) -> KindReport:
    """Judge the stored comparisons of a night together; store verdicts and the report.

    pool None: no device is asked. is_last_try: the night is done even if some comparisons had no
    device. again: also a night that was judged.
    """
    # One transaction: if the process is killed here, nothing is stored and all of it is repeated.
    with database.session() as session:
        lock_for_writing(session.connection())  # of two processes, one judges
        [night] = queries.night_states(session, key=info.key)
        if night.state == "done" and night.report and not again:
            return _parse_report(night.report)
        refusal = "" if pool is None else pool.refusal(info.gpu)
        if night.state == "measuring":
            outcome = NightOutcome.REFUSED if refusal else NightOutcome.ABSENT
            report = _summary(session, info, commit, outcome=outcome)
            if rules.alerting:
                events.add_nightly_event(session, report)
            return report
        run = queries.run_by_uuid_prefix(session, info.run)
        notes = queries.history_notes(session, commit.project, since=run.created_at)
        plan = night.plan or {}
        notes.extend(plan.get("notes", ()))
        if refusal:
            notes.append(f"some workers did not start: {refusal}")
        jobs = queries.jobs_of(session, info.run, kind=COMPARE)
        asked = {job.id: CompareJob.from_data(job.content or {}) for job in jobs}
        stored = stored_comparisons(asked, queries.comparison_outcomes(session, info.run))
        shas = {sha for job in asked.values() for sha in (job.base, job.head)}
        # The night's own too: its project's alerts are judged again, even if nothing was compared.
        commits = {commit.sha: commit} | {
            sha: queries.commit_info(session, sha, commit.project) or _commit_of(rules, commit, sha)
            for sha in shas - {commit.sha}
        }
        measured_by = [device for _, device, _ in queries.device_medians(session, info.run)]
        judged, looked_back = Night(()), LookedBack(0, 0)
        if devices := [*stored.devices, *measured_by]:
            backend: Backend = "cuda" if devices[0].backend == "cuda" else "cpu"
            machine = Machine(backend, devices[0], commit.project)
            judged = record_night(
                session,
                stored.comparisons,
                _Measured(machine, queries.series_of_run(session, info.run)),
                commits,
                alerting=rules.alerting,
                devices=stored.devices,
            )
            looked_back = store_change_points(session, info.run, devices[0])
        if looked_back.device_changes:
            notes.append(
                f"{looked_back.device_changes} series changed with the device: no commit is "
                "named, as no device measured them before and after"
            )
        verdicts = Counter(
            judgement.confirmation.verdict.value
            for judgement in judged.judged
            if not judgement.is_canary
        )
        # Of an earlier judgement, by the comparisons that had a result then.
        earlier = _parse_report(night.report) if night.report else None
        report = _summary(
            session,
            info,
            commit,
            candidates=plan.get("candidates", 0),
            verdicts=dict(verdicts),
            opened=(*(earlier.opened if earlier else ()), *judged.opened),
            fixed=(*(earlier.fixed if earlier else ()), *judged.fixed),
            changed=(
                *(earlier.changed if earlier else ()),
                *(change.text for change in judged.changed),
            ),
            canaries=sum(judgement.is_canary for judgement in judged.judged),
            change_points=looked_back.stored,
            retracted=looked_back.retracted,
            notes=tuple(notes),
            worse=_worse(judged.judged),
            budget=rules.candidates,
            not_compared=tuple(tuple(row) for row in plan.get("not_compared", ())),
            comparisons=sum(len(job.cases) for job in asked.values()),
            uncompared=tuple(
                (case.key, asked[job.id].base, job.reason or f"the job is {job.state}")
                for job in jobs
                if job.state != "done"
                for case in asked[job.id].cases
            ),
        )
        if rules.alerting:
            events.add_alert_events(session, judged.opened, judged.changed)
            events.add_improvement_events(session, judged.judged, info.gpu)
            events.add_nightly_event(session, report)
        is_open = any(job.state in UNFINISHED_JOB_STATES for job in jobs)
        state = "comparing" if is_open and not is_last_try else "done"
        at = night.updated_at if again else datetime.now(UTC)  # that of its state
        set_night(session, info, state, report=asdict(report), at=at)
    return report


@dataclass(frozen=True, slots=True)
class _Measured:
    """The device of a night's comparisons. series: of the night's results, by case.

    They name the series also where another commit's kernels are loaded, or none.
    """

    machine: Machine
    series: Mapping[str, Mapping[str, Any]]

    @property
    def device(self) -> DeviceInfo:
        return self.machine.device

    def series_of(self, case: Case) -> dict[str, Any]:
        return dict(self.series.get(case.key) or self.machine.series_of(case))


def _not_judged(
    database: Database, info: NightInfo, commit: CommitInfo, error: FlexqError
) -> KindReport:
    """Report a night that stays unfinished, so that the other kinds of GPU are reported too."""
    log.warning("night %s on %s is not judged: %s", info.name, info.gpu, error)
    with database.session() as session:
        note = f"not judged: {one_line(error)}"
        outcome = NightOutcome.INCOMPLETE
        return _summary(session, info, commit, outcome=outcome, notes=(note,))


def _with_notes(
    reports: Sequence[KindReport], waiting: Sequence[tuple[queries.NightState, str]]
) -> list[KindReport]:
    """Note the earlier nights that can't be continued, and why, on reports on their kind of GPU."""
    noted = list(reports)
    for night, reason in waiting:
        note = (
            f"night {night.name} at {night.commit[:10]} still lacks comparisons on {night.gpu}: "
            f"{reason}"
        )
        log.warning("%s", note)
        gpus = [report.gpu for report in noted]
        if noted:
            at = gpus.index(night.gpu) if night.gpu in gpus else 0
            noted[at] = replace(noted[at], notes=(*noted[at].notes, note))
    return noted


def _of_refused_gpus(
    pool: Pool, reports: Sequence[KindReport], commit: CommitInfo
) -> Iterator[KindReport]:
    """Yield reports on GPUs that took part in no earlier night, whose workers did not start now."""
    known = [set(re.split(r"\W+", report.gpu)) for report in reports]
    for gpu, reason in pool.refused_gpus.items():
        if reports and not any(words.issuperset(gpu.split("-")) for words in known):
            night, suite = reports[-1].night, reports[-1].suite
            yield KindReport(
                *(night, suite, gpu, commit.sha, "", 0, 0, {}, {}),
                notes=(f"no worker started: {reason}",),
                outcome=NightOutcome.REFUSED,
            )


def _commit_of(rules: Rules, commit: CommitInfo, sha: str) -> CommitInfo:
    """Return another commit of the same project."""
    return replace(commit_at(rules.repository or Path(), sha), project=commit.project)


def _nights_waited(session: Session, info: NightInfo, commit: CommitInfo) -> dict[str, int]:
    """Return, by case key, how many nights each candidate not compared so far has waited."""
    nights = queries.night_states(
        session, suite=info.suite, project=commit.project, limit=_RECENT_NIGHTS * 10
    )
    earlier = [
        night
        for night in nights
        if night.gpu == info.gpu and night.key != info.key and night.state == "done"
    ]
    if not earlier:
        return {}
    latest = max(earlier, key=lambda night: night.updated_at)
    return {key: int(nights) for key, nights, *_ in latest.report.get("not_compared", ())}


def _not_compared(
    suspects: Suspects, waiting: Mapping[str, int], rules: Rules
) -> tuple[tuple[str, int, float], ...]:
    not_compared = suspects.outliers[rules.candidates :]
    return tuple((s.case.key, waiting.get(s.case.key, 0) + 1, s.sigmas) for s in not_compared)


def _worse(judged: Sequence[Judged]) -> tuple[str, ...]:
    worse = [case for case in judged if case.is_worse and not case.is_canary]
    wrong = [case for case in worse if math.isnan(case.confirmation.log_ratio)]
    slower = [case for case in worse if case not in wrong]
    slower.sort(key=lambda case: case.confirmation.log_ratio, reverse=True)
    return tuple(
        f"{case.confirmation.verdict}: {case.case.key}, {case.confirmation.reason} "
        f"({case.compared.base[:10]}..{case.compared.head[:10]})"
        for case in (*wrong, *slower)
    )


def _store_absent_kinds(
    database: Database,
    pool: Pool,
    suite: Suite,
    commit: CommitInfo,
    rules: Rules,
    present: set[str],
) -> list[NightInfo]:
    """Store a run without a device for each kind of GPU that is expected but unavailable.

    Return the nights of these kinds.
    """
    with database.session() as session:
        plans = {
            night.gpu: queries.run_info(session, night.run).plan
            for night in reversed(_recent_nights(session, suite.name, commit))
            if night.gpu not in present
        }
    nights = []
    for gpu, plan in plans.items():
        key = night_key(rules.night, suite.name, gpu, commit)
        known = _stored(database, key)
        if known is not None:
            nights.append(_info(known))
            continue
        named = replace(new_run(suite.name, "nightly", plan), idempotency_key=key)
        reason = pool.refusal(gpu) or f"no {gpu} was available"
        with open_run(database, named, commit, rules.options) as run:
            run.status = "interrupted"
            with database.session() as session:
                jobs = [JobInfo(case, reason=reason) for case in plan]
                add_jobs(session, run.info.uuid, jobs)
        info = NightInfo(key, rules.night, suite.name, gpu, run.info.uuid)
        _set_state(database, info, "measuring")
        nights.append(info)
        log.warning("%s: %d cases wait for one", reason, len(plan))
    return nights


def _summary(
    session: Session,
    info: NightInfo,
    commit: CommitInfo,
    *,
    outcome: NightOutcome | None = None,
    **concluded: Any,
) -> KindReport:
    """outcome None: by the missing results and comparisons."""
    run = queries.run_by_uuid_prefix(session, info.run)
    reasons: dict[str, int] = defaultdict(int)
    without_device = queries.jobs_of(session, info.run, states=("no-device",))
    filled_in = queries.series_of_run(session, info.run) if without_device else {}
    for job in without_device:
        if job.repetition > 1 or job.case_key not in filled_in:
            reasons[job.reason] += 1
    for row in queries.run_outcomes(session, [info.run]):
        if row.status in ("failed", "incorrect"):
            reasons[f"{row.status}: {row.detail}"] += row.cases
    if outcome is None:
        is_complete = not run.missing and not concluded.get("uncompared")
        outcome = NightOutcome.COMPLETE if is_complete else NightOutcome.INCOMPLETE
    return KindReport(
        outcome=outcome,
        night=info.name,
        suite=info.suite,
        gpu=info.gpu,
        commit=commit.sha,
        run=info.run,
        planned=run.planned,
        received=run.planned - run.missing,
        statuses=run.statuses,
        reasons=dict(reasons),
        **concluded,
    )


def _missing(run: OpenRun) -> set[str]:
    with run.database.session() as session:
        return set(queries.cases_to_measure(session, run.info.uuid))


def _stored(database: Database, key: str) -> queries.NightState | None:
    with database.session() as session:
        states = queries.night_states(session, key=key)
    return states[0] if states else None


def _info(night: queries.NightState) -> NightInfo:
    return NightInfo(night.key, night.name, night.suite, night.gpu, night.run)


def _set_state(
    database: Database, info: NightInfo, state: str, *, after: str | None = None
) -> None:
    with database.session() as session:
        set_night(session, info, state, after=after, at=datetime.now(UTC))


def _parse_report(data: Mapping[str, Any]) -> KindReport:
    values = {**data}
    for name in ("opened", "fixed", "changed", "notes", "worse"):
        values[name] = tuple(values.get(name, ()))
    for name in ("not_compared", "uncompared"):
        values[name] = tuple(tuple(row) for row in values.get(name, ()))
    return KindReport(**values)
