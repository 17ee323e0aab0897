"""Series of a run that are compared: what stands out, has crept, or may be fixed.

The rule is `flexq_bench.verdicts.alert_rule`; this file asks the database what the rule needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from db import queries
from db.decisions import OPEN_STATES
from db.engine import Session
from db.queries import AlertRow, HistoryPoint
from db.records import CommitInfo
from flexq_bench.verdicts import Verdict, creep, trigger
from flexq_bench.verdicts.alert_rule import (
    RELEASE_RESULTS,
    has_crept_further,
    is_near_good_level,
    kernel_family,
)
from flexq_bench.verdicts.budget import Surprise, joint_sigmas, ranked, surprise
from workloads.case import Case
from workloads.probes import EMPTY_KERNEL


@dataclass(frozen=True, slots=True)
class Suspect:
    """A series that a run measured, by its id, and the case that it is of.

    latest: the run's own result. earlier: those of the same epoch before it, oldest first.
    sigmas: that latest is away from its history. joint: that its family is, all series together.
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

    comparable: every case that the run measured and that can be compared. outliers: series that
    deviate from their history. crept, perhaps_fixed: each with the commit that it is compared with.
    """

    comparable: Sequence[Case]
    outliers: Sequence[Suspect]
    crept: Sequence[tuple[str, Suspect]]
    perhaps_fixed: Sequence[tuple[str, Suspect]]

    @property
    def candidates(self) -> int:
        """Number of series that their history made suspicious."""
        of_release = (suspect for _, suspect in self.crept)
        return len({suspect.series for suspect in (*self.outliers, *of_release)})


def suspects_of(
    session: Session, run: str, commit: CommitInfo, waiting: Mapping[str, int] | None = None
) -> Suspects:
    """Of a run that measured this commit. The empty kernel is no GEMM to slow down.

    waiting: by case key, the nights that a candidate has waited for a comparison.
    """
    cases, measured = [], []
    for row in queries.run_results(session, run):
        # An interleaved comparison is under `boost`, and says nothing of steady load.
        if row.median_us is None or row.status not in ("ok", "noisy") or row.regime == "sustained":
            continue
        if row.kernel == EMPTY_KERNEL:
            continue
        case = replace(Case.from_key(row.case), model=row.model, layer=row.layer)
        cases.append(case)
        points = queries.series_history(session, row.series_id, without_sweeps=True)
        for latest in [point for point in points if point.run == run][-1:]:
            earlier = [p for p in points if p.run != run and p.epoch == latest.epoch]
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
    """Series that are slower than at the release before the commit, with that release's commit.

    Each of many small steps is within the noise of its night. Left out are series of open alerts,
    and those that a comparison with the release has answered, unless they have changed further.
    """
    head = commit.topo_order or 0
    releases = queries.releases(session, project=commit.project)
    places = ((r.sha, r.topo_order) for r in releases if r.topo_order is not None)
    release, place = next(((sha, at) for sha, at in places if at < head), ("", head))
    if not release:
        return []
    alerted = {series for alert in alerts for series in alert.series}
    changes = {}
    for suspect in measured:
        change = _since(suspect, place, up_to=head)
        if change > 0 and suspect.series not in alerted:
            changes[suspect.series] = change, suspect
    for series, known in queries.latest_decisions_from(session, release, changes).items():
        change, suspect = changes[series]
        # Then the history said so, too: it takes more for another comparison.
        then = _since(suspect, place, up_to=known.head_order or head)
        if not has_crept_further(change, then):
            del changes[series]
    slowest_first = sorted(changes.values(), key=lambda one: -one[0])
    return [(release, suspect) for _, suspect in slowest_first]


def _perhaps_fixed(
    measured: Sequence[Suspect], alerts: Sequence[AlertRow]
) -> list[tuple[str, Suspect]]:
    """Series of open alerts that are back near their good level, with the last good commit.

    What was slow for a night or two does not stand out when it is back, as its history is what it
    was: nobody would compare it, and its alert would stay open.
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


def _since(suspect: Suspect, release: int, *, up_to: int) -> float:
    """ln of how much slower a series is than at a place in the ancestry; 0: it may be as fast.

    up_to: a later place, whose results are the newest to look at.
    """
    points = (*suspect.earlier, suspect.latest)
    placed = [(p.topo_order, p.median_us) for p in points if p.topo_order is not None]
    until = [us for place, us in placed if place <= release]
    since = [us for place, us in placed if release < place <= up_to]
    looked = creep(until[-RELEASE_RESULTS:], since)
    return looked.log_change if looked.verdict is Verdict.CANDIDATE else 0.0


def _is_back(earlier: Sequence[HistoryPoint], latest: HistoryPoint, alert: AlertRow) -> bool:
    """Return True if the result is nearer to those up to the good commit than to later ones."""
    last_good = None if alert.good is None else alert.good.topo_order
    first_bad = alert.bad.topo_order
    if last_good is None or first_bad is None or (latest.topo_order or 0) <= first_bad:
        return False
    good = [p.median_us for p in earlier if p.topo_order is not None and p.topo_order <= last_good]
    bad = [p.median_us for p in earlier if p.topo_order is not None and p.topo_order >= first_bad]
    return is_near_good_level(latest.median_us, good, bad)
