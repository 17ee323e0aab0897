"""Which series of a run are worth a comparison: what stands out, and what may be fixed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from db import queries
from db.decisions import OPEN_STATES
from db.engine import Session
from db.queries import AlertRow, HistoryPoint
from flexq_bench.probes import EMPTY_KERNEL
from flexq_bench.regress import Verdict, trigger
from workloads.case import Case


@dataclass(frozen=True, slots=True)
class Suspect:
    """A series, by its id, and the case that it is of."""

    series: int
    case: Case


def comparable(session: Session, run: str) -> list[Suspect]:
    """Series that the run measured and that can be compared. The empty kernel is no GEMM to slow
    down."""
    return [
        Suspect(row.series_id, replace(Case.from_key(row.case), model=row.model, layer=row.layer))
        for row in queries.run_results(session, run)
        if row.median_us is not None
        and row.status in ("ok", "noisy")
        and row.kernel != EMPTY_KERNEL
    ]


def standing_out(session: Session, run: str) -> list[Suspect]:
    """Series whose result of the run stands out of their history, those that changed most first."""
    found = []
    for suspect in comparable(session, run):
        earlier, latest = _history(session, suspect.series, run)
        if latest is None:
            continue
        looked = trigger([point.median_us for point in earlier], latest.median_us)
        if looked.verdict is Verdict.CANDIDATE:
            found.append((abs(looked.log_change), suspect))
    return [suspect for _, suspect in sorted(found, key=lambda one: -one[0])]


def perhaps_fixed(session: Session, run: str) -> list[tuple[str, Suspect]]:
    """Series of open alerts that are back near their good level, with the last good commit.

    What was slow for a night or two does not stand out when it is back, as its history is what it
    was: nobody would compare it, and its alert would stay open.
    """
    measured = {suspect.series: suspect for suspect in comparable(session, run)}
    found = []
    for alert in queries.alerts(session, states=OPEN_STATES):
        for series in alert.series:
            if alert.good is None or series not in measured:
                continue
            earlier, latest = _history(session, series, run)
            if latest is not None and _is_back(earlier, latest, alert):
                found.append((alert.good.sha, measured[series]))
    return found


def _history(
    session: Session, series: int, run: str
) -> tuple[list[HistoryPoint], HistoryPoint | None]:
    """Results of the same epoch before the run's, and the run's own."""
    points = queries.series_history(session, series, without_sweeps=True)
    tonight = [point for point in points if point.run == run]
    if not tonight:
        return [], None
    latest = tonight[-1]
    return [p for p in points if p.run != run and p.epoch == latest.epoch], latest


def _is_back(earlier: Sequence[HistoryPoint], latest: HistoryPoint, alert: AlertRow) -> bool:
    """Whether tonight is nearer to the results up to the good commit than to those since."""
    last_good = None if alert.good is None else alert.good.topo_order
    first_bad = alert.bad.topo_order
    if last_good is None or first_bad is None or (latest.topo_order or 0) <= first_bad:
        return False
    good = [p.median_us for p in earlier if p.topo_order is not None and p.topo_order <= last_good]
    bad = [p.median_us for p in earlier if p.topo_order is not None and p.topo_order >= first_bad]
    if not good or not bad:
        return True  # it was wrong, so it has no time: any that it has now is news
    return _apart(latest, good) < _apart(latest, bad)


def _apart(latest: HistoryPoint, level: Sequence[float]) -> float:
    return abs(math.log(latest.median_us / statistics.median(level)))
