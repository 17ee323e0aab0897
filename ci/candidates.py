"""Series of a run to compare: outliers, creeping slow-downs, and open alerts that may be fixed.

The rule is in `flexq_bench.verdicts.alert_rule`; this module queries its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flexq_bench.db import queries
from flexq_bench.db.decisions import OPEN_STATES
from flexq_bench.db.engine import Session
from flexq_bench.db.queries import AlertRow, HistoryPoint
from flexq_bench.db.records import CommitInfo
from flexq_bench.verdicts import Verdict, creep, trigger
from flexq_bench.verdicts.alert_rule import (
    RELEASE_RESULTS,
    has_crept_further,
    is_near_good_level,
    kernel_family,
)
from flexq_bench.verdicts.budget import Surprise, joint_sigmas, ranked, surprise
from flexq_bench.verdicts.commit_points import one_per_commit
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.probes import EMPTY_KERNEL


@dataclass(frozen=True, slots=True)
class Suspect:
    """A series that a run measured. series: its id. case: its case.

    latest: the run's commit. earlier: the other commits of the same epoch, oldest first.
    sigmas: distance of latest from its history. joint: of all series of its family together.
    """

    series: int
    case: Case
    latest: HistoryPoint
    earlier: Sequence[HistoryPoint]
    sigmas: float = 0.0
    joint: float = 0.0


@dataclass(frozen=True, slots=True)
class Suspects:
    """Series of a run to compare, the most suspicious first.

    comparable: every case of the run that can be compared. outliers: series that deviate from their
    history. crept, perhaps_fixed: each with the commit to compare with.
    """

    comparable: Sequence[Case]
    outliers: Sequence[Suspect]
    crept: Sequence[tuple[str, Suspect]]
    perhaps_fixed: Sequence[tuple[str, Suspect]]

    @property
    def candidates(self) -> int:
        """Number of series that are outliers or have crept."""
        crept = (suspect for _, suspect in self.crept)
        return len({suspect.series for suspect in (*self.outliers, *crept)})


def suspects_of(
    session: Session, run: str, commit: CommitInfo, waiting: Mapping[str, int] | None = None
) -> Suspects:
    """Return the suspects of a run that measured this commit, without the empty kernel.

    waiting: by case key, the nights that a candidate has waited for a comparison.
    """
    cases, measured = [], []
    branch = queries.branch_of(session, commit.sha, commit.project)
    for row in queries.run_results(session, run):
        # An interleaved comparison measures under `boost` and can't confirm steady load.
        if row.median_us is None or row.status not in ("ok", "noisy") or row.regime == "sustained":
            continue
        if row.kernel == EMPTY_KERNEL:
            continue
        case = replace(Case.from_key(row.case), model=row.model, layer=row.layer)
        cases.append(case)
        points = one_per_commit(
            queries.series_history(session, row.series_id, without_sweeps=True, branch=branch)
        )
        for latest in [point for point in points if point.commit == commit.sha][-1:]:
            earlier = [p for p in points if p != latest and p.epoch == latest.epoch]
            measured.append(Suspect(row.series_id, case, latest, earlier))
    alerts = queries.alerts(session, states=OPEN_STATES)
    return Suspects(
        cases,
        _outliers(measured, waiting or {}),
        _crept(session, measured, alerts, commit),
        _perhaps_fixed(measured, alerts),
    )


def _outliers(measured: Sequence[Suspect], waiting: Mapping[str, int]) -> list[Suspect]:
    """Return series that deviate from their history, most suspicious first (`verdicts.budget`)."""
    surprises = []
    for suspect in measured:
        history, latest = [p.median_us for p in suspect.earlier], suspect.latest.median_us
        surprises.append(
            Surprise(
                surprise(history, latest),
                kernel_family(suspect.case.kernel),
                is_candidate=trigger(history, latest).verdict is Verdict.CANDIDATE,
                waited=waiting.get(suspect.case.key, 0),
            )
        )
    joint = joint_sigmas(surprises)
    return [
        replace(measured[at], sigmas=surprises[at].sigmas, joint=joint[surprises[at].family])
        for at in ranked(surprises)
    ]


def _crept(
    session: Session, measured: Sequence[Suspect], alerts: Sequence[AlertRow], commit: CommitInfo
) -> list[tuple[str, Suspect]]:
    """Return series that are slower than at the previous release, with the release's commit.

    Each of many small steps may be within the noise of a night. Leaves out series of open alerts,
    and series already compared with the release, unless they have changed further.
    """
    row = queries.commit_row(session, commit.sha, project=commit.project)
    head = 0 if row is None else row.topo_order or 0
    releases = queries.releases(session, project=commit.project)
    orders = ((r.sha, r.topo_order) for r in releases if r.topo_order is not None)
    release, order = next(((sha, at) for sha, at in orders if at < head), ("", head))
    if not release:
        return []
    alerted = {series for alert in alerts for series in alert.series}
    changes = {}
    for suspect in measured:
        change = _slow_down_since(suspect, order, up_to=head)
        if change > 0 and suspect.series not in alerted:
            changes[suspect.series] = change, suspect
    for series, known in queries.latest_decisions_from(session, release, changes).items():
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
    """Return series of open alerts that are near their good level, with the last good commit.

    A series that was slow for a night or two is no outlier when it recovers, because its history is
    mostly at the good level. Without this comparison its alert would stay open.
    """
    by_series = {suspect.series: suspect for suspect in measured}
    return [
        (alert.good.sha, by_series[series])
        for alert in alerts
        for series in alert.series
        if alert.good is not None
        and series in by_series
        and _is_back(by_series[series].earlier, by_series[series].latest, alert)
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


def _is_back(earlier: Sequence[HistoryPoint], latest: HistoryPoint, alert: AlertRow) -> bool:
    """Return True if the result is nearer to those before the alert than to those after it."""
    last_good = None if alert.good is None else alert.good.topo_order
    first_bad = alert.bad.topo_order
    if last_good is None or first_bad is None or (latest.topo_order or 0) <= first_bad:
        return False
    good = [p.median_us for p in earlier if p.topo_order is not None and p.topo_order <= last_good]
    bad = [p.median_us for p in earlier if p.topo_order is not None and p.topo_order >= first_bad]
    return is_near_good_level(latest.median_us, good, bad)
