"""Backfill: missing results of earlier nights, newest first, and whole histories of a project."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any

from flexq_bench.ci.change_points import store_change_points
from flexq_bench.ci.notifications import events
from flexq_bench.db import queries
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.nightly import NightInfo, set_night
from flexq_bench.db.queries import BACKFILL
from flexq_bench.db.records import CommitInfo
from flexq_bench.errors import (
    BrokenRevisionError,
    FlexqError,
    MissingResultsError,
    UsageError,
    one_line,
)
from flexq_bench.fleet.compare_jobs import CompareJob
from flexq_bench.fleet.pool import Pool, Work
from flexq_bench.fleet.run_comparer import comparing_run
from flexq_bench.repository.git import git_output
from flexq_bench.repository.worktrees import resolve_revision, worktree
from flexq_bench.runs.lifecycle import OnRecord, new_run, open_run
from flexq_bench.runs.plan import build_plan
from flexq_bench.verdicts.alert_rule import DETECTOR
from flexq_bench.verdicts.change_points import Point, find_change_points
from flexq_bench.verdicts.nightly import record_night
from flexq_bench.verdicts.standing import history_of
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.probes import is_probe
from flexq_bench.workloads.suite import Suite

_TIMEOUT_S = 4 * 3600.0  # per gap, so that a night ends before the next one

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gap:
    """An earlier night's run that lacks results on a kind of GPU that is here now."""

    night: str
    run: str  # uuid
    gpu: str
    commit: str
    missing: int


@dataclass(frozen=True, slots=True)
class FillResult:
    """Result of filling a gap. remaining: cases without a result. detail: the reason, or empty."""

    gap: Gap
    remaining: int
    detail: str = ""


def history_order(measured: Sequence[bool]) -> Iterator[int]:
    """Yield the indices of the commits to measure: the newest, the oldest, then middles of gaps.

    measured: which commits have results already, oldest first. The largest gap between measured
    commits is halved first, of equal ones the newest, so that an interrupted history is even.
    """
    known = [index for index, is_measured in enumerate(measured) if is_measured]
    for end in (len(measured) - 1, 0):
        if measured and end not in known:
            yield end
            known.append(end)
    gaps = [(low - high, -low) for low, high in pairwise(sorted(known)) if high - low > 1]
    heapify(gaps)
    while gaps:
        width, low = heappop(gaps)
        low = -low
        high = low - width
        middle = (low + high) // 2
        yield middle
        for first, last in ((low, middle), (middle, high)):
            if last - first > 1:
                heappush(gaps, (first - last, -first))


def history_commits(repository: Path, span: str, every: int) -> list[str]:
    """Return every so many of the commits of A..B on its first-parent line, oldest first.

    The newest is one of them. Raises UsageError if git does not know the revisions.
    """
    first, dots, last = span.partition("..")
    if not dots or not last.strip("."):
        raise UsageError(f"--commits {span}: name a range of revisions, such as v1.0..HEAD")
    base = resolve_revision(repository, first) if first else None
    head = resolve_revision(repository, last)
    names = [head, *([f"^{base}"] if base else [])]
    newest_first = git_output(repository, "rev-list", "--first-parent", *names).splitlines()
    return newest_first[::every][::-1]


@dataclass(frozen=True, slots=True)
class CommitResult:
    """Results of a commit on a kind of GPU. detail: why some are missing; empty: none is."""

    commit: str
    gpu: str
    run: str  # uuid; empty: it could not be measured
    planned: int
    received: int
    detail: str = ""


def run_key(suite: str, gpu: str, commit: CommitInfo) -> str:
    """Return the idempotency key of the run at an earlier commit."""
    return f"{BACKFILL} {suite} {gpu} {commit.sha}"


def measure_commit(
    database: Database,
    pool: Pool,
    suite: Suite,
    commit: CommitInfo,
    options: Mapping[str, Any],
    *,
    is_newest: bool,
    progress: Callable[[int], AbstractContextManager[OnRecord]],
) -> list[CommitResult]:
    """Measure the missing cases of a suite at a commit on every available kind of GPU.

    is_newest: its results are the latest of their series; those of a backfill never are.
    Interrupted, it goes on where it was.
    """
    works: list[Work] = []
    with ExitStack() as runs:
        for kind in pool.kinds:
            plan = build_plan(suite, kind.backend, kind.capability)
            key = run_key(suite.name, kind.gpu, commit)
            trigger = "manual" if is_newest else BACKFILL
            named = replace(new_run(suite.name, trigger, plan.keys), idempotency_key=key)
            run = runs.enter_context(open_run(database, named, commit, options))
            with database.session() as session:
                missing = set(queries.cases_to_measure(session, run.info.uuid))
            cases = tuple(case for case in plan.cases if case.key in missing)
            works.append(Work(run, kind.gpu, cases))
        with progress(sum(len(work.cases) for work in works)) as on_record:
            pool.measure(works, on_record)
    results = []
    with database.session() as session:
        for work in works:
            stored = queries.run_by_uuid_prefix(session, work.run.info.uuid)
            outcomes = queries.run_outcomes(session, [stored.uuid])
            failed = next((o.detail for o in outcomes if o.status in ("failed", "incorrect")), "")
            received = stored.planned - stored.missing
            results.append(
                CommitResult(commit.sha, work.gpu, stored.uuid, stored.planned, received, failed)
            )
    return results


@dataclass(frozen=True, slots=True)
class OpenedCommit:
    """A commit with what measures it. pool: of its kernels. suite: its cases."""

    pool: Pool
    suite: Suite
    commit: CommitInfo


@dataclass(frozen=True, slots=True)
class MeasuredHistory:
    """Results of the commits that were measured now, change points and verdicts of the history."""

    results: tuple[CommitResult, ...]
    changes: int
    confirmed: Confirmed


def measure_history(
    database: Database,
    repository: Path,
    commits: Sequence[str],
    known: Collection[str],
    opened_at: Callable[[str], AbstractContextManager[OpenedCommit]],
    options: Mapping[str, Any],
    *,
    budget: int,
    alerting: bool,
    progress: Callable[[int], AbstractContextManager[OnRecord]],
    on_result: Callable[[CommitResult], None],
    on_measured: Callable[[], None],
) -> MeasuredHistory:
    """Measure commits that are not known, then find and confirm the changes of their history.

    A commit that can't be measured is a result with the reason. commits: oldest first. budget,
    alerting: as of confirm_changes. on_result: called with the last result of each commit.
    on_measured: called before changes are looked for.
    """

    def measured_at(sha: str) -> list[CommitResult]:
        with opened_at(sha) as opened:
            return measure_commit(
                *(database, opened.pool, opened.suite, opened.commit, options),
                is_newest=not known and sha == commits[-1],
                progress=progress,
            )

    results: list[CommitResult] = []
    for index in history_order([sha in known for sha in commits]):
        try:
            results += measured_at(commits[index])
        except (BrokenRevisionError, MissingResultsError, WorkloadError) as error:
            results.append(CommitResult(commits[index], "", "", 0, 0, one_line(error)))
        on_result(results[-1])
    on_measured()
    usable = {*known, *(result.commit for result in results if result.run)}
    newest = next((sha for sha in reversed(commits) if sha in usable), None)
    if newest is None:
        return MeasuredHistory(tuple(results), 0, Confirmed())
    # Nothing was measured: an earlier call may have been interrupted before this.
    latest = [result for result in results if result.run] or measured_at(newest)
    changes = find_changes(database, latest)
    with opened_at(newest) as opened:
        confirmed = confirm_changes(
            *(database, opened.pool, repository, opened.commit, latest),
            budget=budget,
            alerting=alerting,
        )
    return MeasuredHistory(tuple(results), changes, confirmed)


def find_changes(database: Database, results: Sequence[CommitResult]) -> int:
    """Store the change points of the histories of these results; return their number."""
    with database.session() as session:
        newest = {result.gpu: result.run for result in reversed(results) if result.run}
        stored = 0
        for run in newest.values():
            device = next(iter(queries.device_medians(session, run)), None)
            if device is not None:
                stored += store_change_points(session, run, device[1]).stored
        return stored


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Verdicts on the changes of a backfill. opened: ids of new alerts. obstacles: why not all."""

    verdicts: int = 0
    opened: tuple[int, ...] = ()
    obstacles: tuple[str, ...] = ()


def confirm_changes(
    database: Database,
    pool: Pool,
    repository: Path,
    commit: CommitInfo,
    results: Sequence[CommitResult],
    *,
    budget: int,
    alerting: bool,
) -> Confirmed:
    """Compare the commits on both sides of the last change of each series, and judge them.

    As a night does: the two take turns on one device, verdicts are stored, and a change for the
    worse that is confirmed opens an alert. Those with a verdict are left out. budget: most series,
    the largest changes first. commit: the newest one, whose project's kernels the pool has.
    """
    verdicts, opened, obstacles = 0, list[int](), list[str]()
    newest = {result.gpu: result.run for result in reversed(results) if result.run}
    for kind in pool.kinds:
        with database.session() as session:
            pairs = _unconfirmed(session, newest.get(kind.gpu, ""), budget)
            commits = {
                sha: queries.commit_info(session, sha, commit.project) or commit
                for pair in pairs
                for sha in pair
            }
        compared = []
        if pairs:
            with comparing_run(database, pool, kind, commit, repository, BACKFILL) as comparer:
                for (base, head), cases in pairs.items():
                    job = CompareJob(base, head, tuple(cases), commit.project)
                    try:
                        compared += comparer.compare(job)
                    except FlexqError as error:
                        obstacles.append(f"{job.name} can't be compared: {one_line(error)}")
        if not compared:
            continue
        with database.session() as session:
            machine = pool.machine(kind.gpu)
            judged = record_night(
                session,
                compared,
                machine,
                commits,
                alerting=alerting,
                devices=[
                    comparer.devices.get(comparison.case.key, machine.device)
                    for comparison in compared
                ],
            )
            if alerting:
                events.add_alert_events(session, judged.opened, judged.changed)
        verdicts += len(judged.judged)
        opened += judged.opened
    return Confirmed(verdicts, tuple(opened), tuple(obstacles))


def _unconfirmed(session: Session, run: str, budget: int) -> dict[tuple[str, str], list[Case]]:
    """Return cases of a run by the two commits around their last change, if it has no verdict.

    Also of changes that wait, since a comparison decides those.
    """
    results = queries.run_results(session, run)
    rows = {row.series_id: row for row in results if not is_probe(row.kernel)}
    stored = queries.change_points_by_series(session, list(rows))
    changes = []
    for series_id, row in rows.items():
        points = history_of(session, series_id)
        shas = [point.commit for point in points]
        found = find_change_points(
            [Point(one.median_us, one.device, reruns=one.reruns) for one in points]
        )
        known = [(one.index, one.before, one.after) for one in found.with_waiting[-1:]]
        for one in stored.get(series_id, [])[-1:]:
            if one.commit in shas[1:]:  # of this epoch
                known.append((shas.index(one.commit), one.before, one.after))
        if not known:
            continue
        place, before, after = max(known)
        base, head = shas[place - 1], shas[place]
        decided = queries.decisions_between(session, base, head).get(series_id)
        if decided is None or decided.detector != DETECTOR:
            changes.append((abs(math.log(after / before)), base, head, row))
    pairs: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for _, base, head, row in sorted(changes, key=lambda one: one[:3], reverse=True)[:budget]:
        case = replace(Case.from_key(row.case), model=row.model, layer=row.layer)
        pairs[base, head].append(case)
    return dict(pairs)


# Runs a flexq-bench command in a checkout; returns its exit status and last line of errors.
Resume = Callable[[Path, Sequence[str]], tuple[int, str]]


def find_gaps(
    database: Database, suite: str, gpus: Sequence[str], *, night: str, cases: int
) -> list[Gap]:
    """Return the newest gaps before `night` with at most `cases` missing cases in total.

    Commits with local changes, outside a git tree or on no branch any more are left out.
    """
    gaps: list[Gap] = []
    with database.session() as session:
        for stored in queries.night_states(session, suite=suite):
            if stored.name >= night or stored.gpu not in gpus or stored.dirty:
                continue
            missing = len(queries.missing_cases(session, stored.run))
            if not missing or stored.commit.startswith("pkg-"):
                continue
            if queries.is_orphaned(session, stored.commit, stored.project):
                continue
            if sum(gap.missing for gap in gaps) + missing > cases:
                break
            gaps.append(Gap(stored.name, stored.run, stored.gpu, stored.commit, missing))
    return gaps


def fill_gap(
    database: Database, gap: Gap, repository: Path, options: Sequence[str], *, resume: Resume
) -> FillResult:
    """Resume the run at its commit, in a temporary checkout.

    options: of `run --resume`, such as --cluster. Failures are returned in `detail`, not raised.
    """
    log.info("filling %d cases of %s on %s", gap.missing, gap.night, gap.gpu)
    try:
        with worktree(repository, gap.commit) as folder:
            status, message = resume(folder, ("run", "--resume", gap.run, *options))
    except FlexqError as error:
        status, message = 1, str(error)
    with database.session() as session:
        remaining = len(queries.missing_cases(session, gap.run))
        if not remaining:
            [stored] = [
                n for n in queries.night_states(session, name=gap.night) if n.run == gap.run
            ]
            info = NightInfo(stored.key, stored.name, stored.suite, stored.gpu, stored.run)
            # Without comparisons: later nights compare with the bases that are trusted by then.
            set_night(session, info, "done", after="measuring", at=datetime.now(UTC))
    return FillResult(gap, remaining, message or f"exit status {status}" if remaining else "")


def resume_in(
    environment: Mapping[str, str], folder: Path, arguments: Sequence[str]
) -> tuple[int, str]:
    """Run flexq-bench from the code of a checkout, in a subprocess.

    environment: variables added to those of this process.
    """
    command = [sys.executable, "-m", "flexq_bench.cli", *arguments]
    try:
        completed = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **environment, "PYTHONPATH": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"stopped after {_TIMEOUT_S / 3600:.0f} hours"
    errors = [line for line in completed.stderr.splitlines() if line.strip()]
    return completed.returncode, errors[-1] if errors else ""
