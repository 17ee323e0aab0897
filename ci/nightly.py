"""Nightly run: measure the newest commit on every kind of GPU, confirm candidates, store verdicts.

Each step stores its state in the database, so an interrupted night is resumed, and one that is done
is not repeated.
"""

from __future__ import annotations

import logging
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flexq_bench.ci.candidates import Suspects, suspects_of
from flexq_bench.ci.change_points import store_change_points
from flexq_bench.ci.notifications import events
from flexq_bench.ci.report_data import MAX_CANDIDATES, KindReport
from flexq_bench.db import queries
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.fleet import JobInfo, add_jobs
from flexq_bench.db.nightly import NightInfo, set_night
from flexq_bench.db.records import CommitInfo
from flexq_bench.errors import FlexqError
from flexq_bench.fleet.pool import Pool, Work
from flexq_bench.repository.provenance import commit_at
from flexq_bench.runs.lifecycle import OnRecord, OpenRun, new_run, open_run
from flexq_bench.runs.plan import build_plan
from flexq_bench.verdicts import CaseComparison, Judged
from flexq_bench.verdicts.nightly import record_night
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.suite import Suite

_RECENT_NIGHTS = 14  # a kind of GPU that took part within these nights is expected

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rules:
    """Options of a nightly run.

    repository None: no git tree, so nothing can be confirmed. canaries: cases per night and kind of
    GPU that compare the commit with itself. candidates: most comparisons per night and kind of
    outliers, of creeping series, and of series that may be fixed. alerting: True on the branch
    whose changes open alerts.
    """

    night: str
    repository: Path | None
    canaries: int = 2
    candidates: int = MAX_CANDIDATES
    alerting: bool = True


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
    are now unavailable, a run without a device is stored.
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
            run = runs.enter_context(open_run(database, named, commit))
            info = NightInfo(key, rules.night, suite.name, kind.gpu, run.info.uuid)
            _set_state(database, info, "measuring")
            nights.append(info)
            missing = _missing(run)
            planned.append(
                Work(run, kind.gpu, tuple(case for case in plan.cases if case.key in missing))
            )
        if planned:
            with progress(sum(len(work.cases) for work in planned)) as on_record:
                pool.measure(planned, on_record)
    measured = {work.run.info.uuid for work in planned}
    for info in nights:
        if info.run in measured:
            _set_state(database, info, "comparing")
    present = {kind.gpu for kind in kinds}
    _store_absent_kinds(database, suite, commit, rules, present)
    return nights


def conclude(
    database: Database, pool: Pool, info: NightInfo, commit: CommitInfo, rules: Rules
) -> KindReport:
    """Compare candidates and canaries; store verdicts, change points and the report.

    The stored report of a night that is done is returned. Failed comparisons become notes.
    """
    stored = _stored(database, info.key)
    assert stored is not None  # measure_night stored it
    if stored.state == "done" and stored.report:
        return _parse_report(stored.report)
    with database.session() as session:
        begun_at = queries.run_by_uuid_prefix(session, info.run).created_at
        notes = queries.history_notes(session, commit.project, since=begun_at)
        waiting = _nights_waited(session, info, commit)
        suspects = suspects_of(session, info.run, commit, waiting)
    comparisons: list[CaseComparison] = []
    if rules.repository is None:
        notes.append("no git tree here: nothing was confirmed")
    elif commit.dirty:
        notes.append("the commit has local changes: nothing was confirmed")
    else:
        for base, head, cases in _comparisons(database, info, commit, suspects, rules):
            try:
                comparisons.extend(pool.compare(info.gpu, rules.repository, base, head, cases))
            except (FlexqError, WorkloadError) as error:  # the latter: of a base's project file
                notes.append(f"{len(cases)} cases of {base[:10]} and {head[:10]}: {error}")
    shas = {sha for comparison in comparisons for sha in (comparison.base, comparison.head)}
    # The night's own too: its project's alerts are judged again, even if nothing was compared.
    commits = {commit.sha: commit} | {
        sha: _commit_of(rules, commit, sha) for sha in shas - {commit.sha}
    }
    machine = pool.machine(info.gpu)
    # One transaction: if the process is killed here, nothing is stored and all of it is repeated.
    with database.session() as session:
        night = record_night(session, comparisons, machine, commits, alerting=rules.alerting)
        stored_points = store_change_points(session, info.run, machine.device)
        if stored_points.device_changes:
            notes.append(
                f"{stored_points.device_changes} series changed with the device: no commit is "
                "named, as no device measured them before and after"
            )
        verdicts: dict[str, int] = defaultdict(int)
        for judged in night.judged:
            if not judged.is_canary:
                verdicts[judged.confirmation.verdict.value] += 1
        report = _summary(
            session,
            info,
            commit,
            candidates=suspects.candidates,
            verdicts=dict(verdicts),
            opened=night.opened,
            fixed=night.fixed,
            changed=tuple(change.text for change in night.changed),
            canaries=sum(judged.is_canary for judged in night.judged),
            change_points=stored_points.stored,
            retracted=stored_points.retracted,
            notes=tuple(notes),
            worse=_worse(night.judged),
            budget=rules.candidates,
            not_compared=_not_compared(suspects, waiting, rules),
        )
        if rules.alerting:
            events.add_alert_events(session, night.opened, night.changed)
            events.add_improvement_events(session, night.judged, info.gpu)
            events.add_nightly_event(session, report)
        set_night(session, info, "done", report=asdict(report), at=datetime.now(UTC))
    return report


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


def _comparisons(
    database: Database,
    info: NightInfo,
    commit: CommitInfo,
    suspects: Suspects,
    rules: Rules,
) -> Iterator[tuple[str, str, list[Case]]]:
    """Yield base, head and cases of the comparisons.

    The base of an outlier is the series' trusted commit, of a creeping series the last release, of
    a series that may be fixed the last good commit, of a canary the head.
    """
    by_base: dict[str, dict[Case, None]] = defaultdict(dict)
    with database.session() as session:
        branch = queries.branch_of(session, commit.sha, commit.project)
        for suspect in suspects.outliers[: rules.candidates]:
            base = queries.trusted_base(session, suspect.series, branch=branch)
            if base is not None and base != commit.sha and not base.startswith("pkg-"):
                by_base[base][suspect.case] = None
    for suspects_of_kind in (suspects.crept, suspects.perhaps_fixed):
        for base, suspect in suspects_of_kind[: rules.candidates]:
            if base != commit.sha:
                by_base[base][suspect.case] = None
    for base, cases_of_base in by_base.items():
        yield base, commit.sha, list(cases_of_base)
    # Different canaries every night, but the same ones if the night is resumed.
    cases = suspects.comparable
    chosen = random.Random(info.key).sample(cases, min(rules.canaries, len(cases)))
    if chosen:
        yield commit.sha, commit.sha, chosen


def _store_absent_kinds(
    database: Database, suite: Suite, commit: CommitInfo, rules: Rules, present: set[str]
) -> None:
    """Store a run without a device for each kind of GPU that is expected but unavailable."""
    with database.session() as session:
        earlier = queries.night_states(
            session, suite=suite.name, project=commit.project, limit=_RECENT_NIGHTS * 10
        )
        names = sorted({night.name for night in earlier}, reverse=True)[:_RECENT_NIGHTS]
        plans = {
            night.gpu: queries.run_info(session, night.run).plan
            for night in reversed(earlier)
            if night.name in names and night.gpu not in present
        }
    for gpu, plan in plans.items():
        key = night_key(rules.night, suite.name, gpu, commit)
        if _stored(database, key) is not None:
            continue
        named = replace(new_run(suite.name, "nightly", plan), idempotency_key=key)
        reason = f"no {gpu} was available"
        with open_run(database, named, commit) as run:
            run.status = "interrupted"
            with database.session() as session:
                jobs = [JobInfo(case, reason=reason) for case in plan]
                add_jobs(session, run.info.uuid, jobs)
        _set_state(
            database, NightInfo(key, rules.night, suite.name, gpu, run.info.uuid), "measuring"
        )
        log.warning("%s: %d cases wait for one", reason, len(plan))


def _summary(session: Session, info: NightInfo, commit: CommitInfo, **concluded: Any) -> KindReport:
    run = queries.run_by_uuid_prefix(session, info.run)
    reasons: dict[str, int] = defaultdict(int)
    for job in queries.jobs_of(session, info.run, states=("no-device",)):
        reasons[job.reason] += 1
    for outcome in queries.run_outcomes(session, [info.run]):
        if outcome.status in ("failed", "incorrect"):
            reasons[f"{outcome.status}: {outcome.detail}"] += outcome.cases
    return KindReport(
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


def _set_state(database: Database, info: NightInfo, state: str) -> None:
    with database.session() as session:
        set_night(session, info, state, at=datetime.now(UTC))


def _parse_report(data: Mapping[str, Any]) -> KindReport:
    values = {**data}
    for name in ("opened", "fixed", "changed", "notes", "worse"):
        values[name] = tuple(values.get(name, ()))
    values["not_compared"] = tuple(tuple(candidate) for candidate in values.get("not_compared", ()))
    return KindReport(**values)
