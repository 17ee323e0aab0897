"""The retrospective pass: where the levels of a run's series changed, stored with its evidence."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

from db import queries
from db.decisions import DecisionInfo
from db.engine import Session
from db.hashing import fingerprint
from db.nightly import add_change_point
from db.queries import HistoryPoint
from db.records import CommitInfo, DeviceInfo
from db.verdict_store import add_decision
from flexq_bench.stats import ChangePoint, change_points
from flexq_bench.stats.level_model import SIGNIFICANCE, SMALLEST_STEP
from flexq_bench.stats.segments import SHORTEST_SEGMENT
from flexq_bench.stats.steps import POINTS_BEFORE_FIRST
from flexq_bench.verdicts import Cause, Verdict

NAME = "retrospective"
# Raise it with every change that can give the same history other change points.
VERSION = 3
PARAMETERS = {
    "points_before_first": POINTS_BEFORE_FIRST,
    "shortest_segment": SHORTEST_SEGMENT,
    "significance": SIGNIFICANCE,
    "smallest_step": SMALLEST_STEP,
}
_LONGEST = 300  # newest results of a series that are looked at
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "flexq-bench")


def store_change_points(session: Session, run_uuid: str, device: DeviceInfo) -> int:
    """Look back over every series of the run, and store what is new; how many that is.

    A result of a commit outside of a git tree has no place in an order, and takes no part.
    """
    stored = 0
    series = {row.series_id for row in queries.run_results(session, run_uuid)}
    for series_id in sorted(series):
        points = queries.series_history(session, series_id, without_sweeps=True)
        last = points[-1].epoch if points else 0
        usable = [p for p in points if p.epoch == last and p.topo_order is not None][-_LONGEST:]
        for point in change_points([result.median_us for result in usable]):
            stored += _store(session, series_id, usable, point, device)
    return stored


def _store(
    session: Session,
    series_id: int,
    results: Sequence[HistoryPoint],
    point: ChangePoint,
    device: DeviceInfo,
) -> bool:
    first, before = results[point.index], results[point.index - 1]
    # No two steps are nearer than the shortest level: a later night may move one by a night or two.
    reach = SHORTEST_SEGMENT - 1
    near = {p.commit for p in results[max(point.index - reach, 0) : point.index + reach + 1]}
    if any(known.commit in near for known in queries.change_points_of(session, series_id)):
        return False
    evidence = {
        "values": [result.median_us for result in results],
        "commits": [result.commit for result in results],
        "index": point.index,
        "p_value": point.p_value,
    }
    name = f"{NAME} {VERSION} {series_id} {fingerprint(evidence)}"
    identity = str(uuid.uuid5(_NAMESPACE, name))
    slower = point.mean_after > point.mean_before
    add_decision(
        session,
        DecisionInfo(
            uuid=identity,
            series=queries.series_identity_of(session, series_id),
            base=_commit(before),
            head=_commit(first),
            device=device,
            watched=False,
            detector=NAME,
            detector_version=VERSION,
            parameters=PARAMETERS,
            evidence=evidence,
            verdict=(Verdict.SLOWER if slower else Verdict.FASTER).value,
            cause=Cause.UNCLEAR.value,
            reason=f"level {point.mean_before:.6g} until here, {point.mean_after:.6g} from here on",
            log_ratio=math.log(point.mean_after / point.mean_before),
            log_ratio_low=None,
            log_ratio_high=None,
            created_at=datetime.now(UTC),
        ),
    )
    return add_change_point(
        session, identity, first.commit, before=point.mean_before, after=point.mean_after
    )


def _commit(point: HistoryPoint) -> CommitInfo:
    # The rest is stored already, and what is unknown here changes none of it.
    return CommitInfo(point.commit, None, point.topo_order, dirty=False)
