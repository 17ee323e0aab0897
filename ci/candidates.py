"""Series of a run to compare: outliers, creeping slow-downs, and open alerts that may be fixed.

The rule is in `flexq_bench.verdicts.alert_rule`; this module queries its inputs.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexq_bench.db import queries
from flexq_bench.db.decisions import OPEN_STATES
from flexq_bench.db.engine import Session
from flexq_bench.db.queries import AlertRow, TimedPoint
from flexq_bench.db.records import CommitInfo
from flexq_bench.packages import without_collection
from flexq_bench.verdicts import Verdict, creep
from flexq_bench.verdicts.alert_rule import (
    HISTORY_RESULTS,
    RELEASE_RESULTS,
    has_crept_further,
    is_near_good_level,
    kernel_family,
)
from flexq_bench.verdicts.budget import Surprise, joint_sigmas, ranked, surprises
from flexq_bench.verdicts.commit_points import one_per_commit
from flexq_bench.verdicts.history_trigger import are_candidates
from flexq_bench.verdicts.known_levels import Compared, known_levels
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.probes import EMPTY_KERNEL, is_probe


@dataclass(frozen=True, slots=True)
class Suspect:
    """A series that a run measured. series: its id. case: its case.

    latest: the run's commit. earlier: the other commits of the same epoch, oldest first. is_news:
    latest differs from what earlier comparisons explain (`known_levels`). sigmas: distance of
    latest from its history. joint: of all series of its family together.
    """

    series: int
    case: Case
    latest: TimedPoint
    earlier: Sequence[TimedPoint]
    is_news: bool = False
    sigmas: float = 0.0
    joint: float = 0.0


@dataclass(frozen=True, slots=True)
class Suspects:
    """Series of a run to compare, the most suspicious first.

    comparable: every case of the run that can be compared. outliers: series that deviate from their
    history. crept, perhaps_fixed: each with the commit to compare with. alerted: ids of the series
    of open alerts. histories: of all of them, to choose bases from.
    """

    comparable: Sequence[Case]
    outliers: Sequence[Suspect]
    crept: Sequence[tuple[str, Suspect]]
    perhaps_fixed: Sequence[tuple[str, Suspect]]
    alerted: frozenset[int] = frozenset()
    histories: Mapping[int, Sequence[TimedPoint]] | None = None

    @property
    def candidates(self) -> int:
        """Number of series that are outliers or have crept."""
        crept = (suspect for _, suspect in self.crept)
        return len({suspect.series for suspect in (*self.outliers, *crept)})


@without_collection()  # of histories
def suspects_of(
    session: Session, run: str, commit: CommitInfo, waiting: Mapping[str, int] | None = None
) -> Suspects:
    """Return the suspects of a run that measured this commit, without probes that it can't change.

    waiting: by case key, the nights that a candidate has waited for a comparison.
    """
    cases, measured = [], []
    branch = queries.branch_of(session, commit.sha, commit.project)
    rows = [
        row
        for row in queries.run_results(session, run)
        # An interleaved comparison measures under `boost` and can't confirm steady load.
        if row.median_us is not None
        and row.status in ("ok", "noisy")
        and row.regime != "sustained"
        and row.kernel != EMPTY_KERNEL
        # No commit of a project changes a probe.
        and not (commit.project and is_probe(row.kernel))
    ]
    alerts = queries.alerts(session, states=OPEN_STATES)
    release, order, head = _last_release(session, commit)
    goods = [one.good for one in alerts if one.good and one.good.project == commit.project]
    # the oldest commit whose level counts
    until = min(
        (at for at in (order, head, *(one.topo_order for one in goods)) if at), default=None
    )
    histories = queries.timed_histories(
        session, {row.series_id for row in rows}, until=until, branch=branch
    )
    for row in rows:
        case = replace(Case.from_key(row.case), model=row.model, layer=row.layer)
        cases.append(case)
        points = one_per_commit(histories.get(row.series_id, ()))
        latest = next((point for point in reversed(points) if point.commit == commit.sha), None)
        if latest is not None:
            epoch = latest.epoch
            earlier = [p for p in points if p.epoch == epoch and p is not latest]
            measured.append(Suspect(row.series_id, case, latest, earlier))
    outliers, measured = _outliers(session, measured, waiting or {})
    on_main = (head or None) if branch is None else None
    since = [
        alert
        for alert in alerts
        if alert.bad.project == commit.project
        and queries.comes_after(session, commit.sha, on_main, alert.bad)
    ]
    perhaps_fixed = _perhaps_fixed(measured, since)
    # They are compared with the last good commit instead.
    back = {suspect.series for _, suspect in perhaps_fixed}
    return Suspects(
        cases,
        [suspect for suspect in outliers if suspect.series not in back],
        _crept(session, measured, alerts, release, order, head),
        perhaps_fixed,
        frozenset(series for alert in alerts for series in alert.series),
        histories,
    )


def planned_comparisons(
    session: Session,
    suspects: Suspects,
    commit: CommitInfo,
    *,
    budget: int,
    canaries: int,
    seed: str,
) -> list[tuple[str, str, list[Case]]]:
    """Return base, head and cases of a night's comparisons.

    budget: most outliers, most creeping series, and most series that may be fixed. The base of an
    outlier is the series' trusted commit, of a creeping series the last release, of a series that
    may be fixed the last good commit, of a canary the head. canaries: number of them: series of
    open alerts that moved, then others by chance (seed).
    """
    by_base: dict[str, dict[Case, None]] = defaultdict(dict)
    branch = queries.branch_of(session, commit.sha, commit.project)
    outliers = suspects.outliers[:budget]
    bases = queries.trusted_bases(
        session,
        [outlier.series for outlier in outliers],
        branch=branch,
        histories=suspects.histories,
    )
    for suspect in outliers:
        base = bases.get(suspect.series)
        if base is not None and base != commit.sha and not base.startswith("pkg-"):
            by_base[base][suspect.case] = None
    for of_kind in (suspects.crept, suspects.perhaps_fixed):
        for base, suspect in of_kind[:budget]:
            if base != commit.sha:
                by_base[base][suspect.case] = None
    planned = [(base, commit.sha, list(cases)) for base, cases in by_base.items()]
    moved = [s.case for s in outliers if s.series in suspects.alerted]
    # Different ones every night, but the same ones if the night is resumed.
    shuffled = random.Random(seed).sample(suspects.comparable, len(suspects.comparable))
    chosen = list(dict.fromkeys([*moved, *shuffled]))[:canaries]
    return [*planned, (commit.sha, commit.sha, chosen)] if chosen else planned


def _outliers(
    session: Session, measured: Sequence[Suspect], waiting: Mapping[str, int]
) -> tuple[list[Suspect], list[Suspect]]:
    """Return series that deviate from their history, most suspicious first (`verdicts.budget`).

    Also returns all series, with whether they are news.
    """
    newest = [suspect.earlier[-HISTORY_RESULTS:] for suspect in measured]
    since = queries.first_time(session, [points[0] for points in newest if points])
    ids = [suspect.series for suspect in measured]
    compared = {} if since is None else queries.comparisons_of(session, ids, since=since)
    levels = []
    for suspect, its_newest in zip(measured, newest, strict=True):
        if suspect.series not in compared:
            history = np.array([point.median_us for point in its_newest])
            levels.append((history, suspect.latest.median_us, history[:0]))
            continue
        points = (*suspect.earlier, suspect.latest)
        places = {point.commit: place for place, point in enumerate(points)}
        known = known_levels(
            [point.median_us for point in points],
            [
                one
                for row in compared[suspect.series]
                if row.base in places and row.head in places
                if (
                    one := Compared.of(
                        row.verdict, row.log_ratio, places[row.base], places[row.head]
                    )
                )
            ],
        )
        recent = [at for at in known.unchanged if at >= len(points) - 1 - HISTORY_RESULTS]
        levels.append((known.values[:-1], float(known.values[-1]), known.values[recent]))
    news = are_candidates(levels)
    judged = [
        replace(comparison, is_news=is_news)
        for comparison, is_news in zip(measured, news, strict=True)
    ]
    sigmas = surprises([(history, latest) for history, latest, _ in levels])
    ranks = [
        Surprise(
            of_series,
            kernel_family(suspect.case.kernel),
            is_candidate=suspect.is_news,
            waited=waiting.get(suspect.case.key, 0),
        )
        for suspect, of_series in zip(judged, sigmas, strict=True)
    ]
    joint = joint_sigmas(ranks)
    outliers = [
        replace(judged[at], sigmas=sigmas[at], joint=joint[ranks[at].family])
        for at in ranked(ranks)
    ]
    return outliers, judged


def _last_release(session: Session, commit: CommitInfo) -> tuple[str, int, int]:
    """Return the newest release before a commit ("": none), its place on the line, the commit's."""
    row = queries.commit_row(session, commit.sha, project=commit.project)
    head = 0 if row is None else row.topo_order or 0
    releases = queries.releases(session, project=commit.project)
    orders = ((r.sha, r.topo_order) for r in releases if r.topo_order is not None)
    return *next(((sha, at) for sha, at in orders if at < head), ("", head)), head


def _crept(
    session: Session,
    measured: Sequence[Suspect],
    alerts: Sequence[AlertRow],
    release: str,
    order: int,
    head: int,
) -> list[tuple[str, Suspect]]:
    """Return series that are slower than at the previous release, with the release's commit.

    Each of many small steps may be within the noise of a night. Leaves out series of open alerts,
    and series already compared with the release, unless they have changed further. order, head:
    places of the release and of the night's commit.
    """
    if not release:
        return []
    alerted = {series for alert in alerts for series in alert.series}
    changes = {}
    for suspect in measured:
        change = _slow_down_since(suspect, order, up_to=head)
        if change > 0 and suspect.series not in alerted:
            changes[suspect.series] = change, suspect
    latest = queries.latest_comparisons(session, [release], changes)
    for (_, series), known in latest.items():
        change, suspect = changes[series]
        # The earlier comparison had the same trigger: only a larger change justifies another.
        then = _slow_down_since(suspect, order, up_to=known.head_order or head)
        if not has_crept_further(change, then):
            del changes[series]
    slowest_first = sorted(changes.values(), key=lambda change: -change[0])
    return [(release, suspect) for _, suspect in slowest_first]


def _perhaps_fixed(
    measured: Sequence[Suspect], alerts: Sequence[AlertRow]
) -> list[tuple[str, Suspect]]:
    """Return series of alerts that are near their good level, with the last good commit.

    A series that was slow for a night or two is no outlier when it recovers, because its history is
    mostly at the good level. Without this comparison its alert would stay open.
    """
    by_series = {suspect.series: suspect for suspect in measured}
    return [
        (alert.good.sha, by_series[series])
        for alert in alerts
        for series in alert.series
        if alert.good is not None and series in by_series and _is_back(by_series[series], alert)
    ]


def _slow_down_since(suspect: Suspect, release: int, *, up_to: int) -> float:
    """Return ln(slow-down) of a series since a commit; 0: no slow-down is detected.

    release, up_to: topological orders of that commit and of the newest one to include.
    """
    points = (*suspect.earlier, suspect.latest)
    medians = [(p.topo_order, p.median_us) for p in points if p.topo_order is not None]
    until = [us for order, us in medians if order <= release]
    since = [us for order, us in medians if release < order <= up_to]
    result = creep(until[-RELEASE_RESULTS:], since)
    return result.log_change if result.verdict is Verdict.CANDIDATE else 0.0


def _is_back(suspect: Suspect, alert: AlertRow) -> bool:
    """Return True if the level moved, to nearer to that before the alert than to that after it."""
    places = {p.commit: p.topo_order for p in suspect.earlier if p.topo_order is not None}
    # A branch's commits have a place on its line only.
    last_good, first_bad = (
        None if one is None else one.topo_order or places.get(one.sha)
        for one in (alert.good, alert.bad)
    )
    if last_good is None:
        return False
    placed = [(p.topo_order, p.median_us) for p in suspect.earlier if p.topo_order is not None]
    good = [us for order, us in placed if order <= last_good]
    bad = [us for order, us in placed if first_bad is not None and order >= first_bad]
    if bad and not suspect.is_news:
        return False
    return is_near_good_level(suspect.latest.median_us, good, bad)
