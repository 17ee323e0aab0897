"""Open alerts judged again: does the evidence that made them still stand?

An alert is open while its evidence stands. Each of its verdicts is looked at in today's data: an
interleaved comparison by the newest comparison with the same base, a verdict by history in the
history of its series. The alert then stands, moves to another range of commits, or ends.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from flexq_bench.db import queries
from flexq_bench.db.engine import Session
from flexq_bench.db.queries import AlertRow, DecisionRow, HistoryPoint
from flexq_bench.verdicts import history_verdict
from flexq_bench.verdicts.alert_rule import NOT_WORSE
from flexq_bench.verdicts.commit_points import one_per_commit
from flexq_bench.verdicts.history_verdict import Metric, Step, judge_history

MAX_RESULTS = 300  # of a series that are analysed, the newest
_NEARBY = 10  # results within which another step for the worse replaces one that is gone
_NEWEST = 5  # results whose median is the newest level
_NEW_EPOCH = 20  # results of a new environment after which an old level is not waited for
_COMMITS_UNMEASURED = 30  # measured commits of a project without any result of an alert's series
_MAX_REASONS = 3

MOVED = "moved"
Range = tuple[str, str]  # shas of the last good commit and the first bad one


@dataclass(frozen=True, slots=True)
class Standing:
    """Today's answer about one verdict of an alert.

    range: where the change is now; None: it is no longer there. is_back: the level is as good as
    before. reason: in words, of what is no longer there or has moved.
    """

    range: Range | None
    reason: str = ""
    is_back: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an alert, or its move to another range. state: MOVED, or the new state."""

    state: str
    reason: str
    range: Range | None = None


def judge_alerts(
    session: Session, alerts: Sequence[AlertRow]
) -> Iterator[tuple[AlertRow, Outcome | None]]:
    """Judge the evidence of open alerts by what is stored now; None: it stands."""
    compared: dict[int, set[int]] = {alert.id: set() for alert in alerts}
    by_history: set[int] = set()
    for alert_id, detector, series_id in queries.alert_members(session, compared):
        if detector == history_verdict.DETECTOR:
            by_history.add(alert_id)
        else:
            compared[alert_id].add(series_id)
    bases = {alert.good.sha for alert in alerts if alert.good is not None}
    latest = queries.latest_comparisons(session, bases, set().union(*compared.values()))
    orphaned = queries.orphaned(session, [(one.bad.sha, one.bad.project) for one in alerts])
    last = queries.last_measured(session, {series for alert in alerts for series in alert.series})
    measured_after = cache(partial(queries.commits_measured_after, session))
    for alert in alerts:
        series = sorted(compared[alert.id]) if alert.good is not None else []
        if series and (alert.bad.sha, alert.bad.project) in orphaned:
            standings = [Standing(None, _gone(alert.bad.sha))]
        else:
            standings = list(_by_comparison(session, alert, series, latest))
        if alert.id in by_history:
            standings += _by_history(session, alert)
        times = [last[series] for series in alert.series if series in last]
        without = measured_after(max(times), project=alert.bad.project) if times else 0
        yield alert, _outcome(session, alert, standings, without)


def _outcome(
    session: Session, alert: AlertRow, standings: Sequence[Standing], without: int
) -> Outcome | None:
    """Return what comes of an alert. without: commits since the last result of its series."""
    ranges = Counter(standing.range for standing in standings if standing.range is not None)
    if standings and not ranges:
        reasons = list(dict.fromkeys(standing.reason for standing in standings))
        more = [f"and {len(reasons) - _MAX_REASONS} more"] if len(reasons) > _MAX_REASONS else []
        words = "; ".join([*reasons[:_MAX_REASONS], *more])
        if all(standing.is_back for standing in standings):
            return Outcome("fixed", f"every series is back {words}")
        return Outcome("ended", words)
    if without >= _COMMITS_UNMEASURED:
        last = f"the last {_COMMITS_UNMEASURED} commits"
        return Outcome("ended", f"none of its series was measured at {last}")
    if shipped := _shipped(session, alert):
        return Outcome("explained", shipped)
    own = ("" if alert.good is None else alert.good.sha, alert.bad.sha)
    if ranges and own not in ranges:
        newest = ranges.most_common(1)[0][0]
        reason = next(s.reason for s in standings if s.range == newest)
        return Outcome(MOVED, reason or "later results place the change there", newest)
    return None


def history_of(session: Session, series_id: int, *, most: int = MAX_RESULTS) -> list[HistoryPoint]:
    """The newest commits of the newest epoch of a series on the main line, a point for each."""
    histories = queries.newest_histories(session, [series_id], commits=most)
    return newest_epoch(histories.get(series_id, []), most=most)


def newest_epoch(history: Sequence[HistoryPoint], *, most: int = MAX_RESULTS) -> list[HistoryPoint]:
    """The newest commits of the newest epoch of a history, a point for each."""
    points = one_per_commit(history)
    last = points[-1].epoch if points else 0
    return [point for point in points if point.epoch == last][-most:]


def metric_of(row: queries.ProjectSeries | DecisionRow) -> Metric:
    """The metric of a stored series."""
    return Metric(row.metric, row.unit, row.direction)


def _by_comparison(
    session: Session,
    alert: AlertRow,
    series_ids: Sequence[int],
    latest: Mapping[tuple[str, int], queries.ComparedRow],
) -> Iterator[Standing]:
    if alert.good is None:
        return
    for series_id in series_ids:
        newest = latest.get((alert.good.sha, series_id))
        if (
            newest is None
            or newest.verdict not in NOT_WORSE
            or not queries.comes_after(session, newest.head, newest.head_order, alert.bad)
        ):
            yield Standing((alert.good.sha, alert.bad.sha))
        else:
            reason = f"at the level of {alert.good.sha[:10]} at {newest.head[:10]}"
            yield Standing(None, reason, is_back=True)


def _by_history(session: Session, alert: AlertRow) -> Iterator[Standing]:
    """Yield the answers of the histories of its series today; none where no change is stored."""
    decisions = [
        one
        for one in queries.alert_decisions(session, alert.id)
        if one.detector == history_verdict.DETECTOR
    ]
    stored = queries.change_points_by_decision(session, [one.uuid for one in decisions])
    ids = {one.series_id for one in decisions}
    histories = queries.newest_histories(session, ids, commits=MAX_RESULTS)
    for decision in decisions:
        if decision.uuid in stored and decision.series_id in histories:
            points = newest_epoch(histories[decision.series_id])
            yield from _by_one_history(session, decision, stored[decision.uuid], points)


def _by_one_history(
    session: Session,
    decision: DecisionRow,
    point: queries.ChangePointRow,
    points: Sequence[HistoryPoint],
) -> Iterator[Standing]:
    metric = metric_of(decision)
    judged = judge_history(
        [one.median_us for one in points], metric, [one.reruns for one in points]
    )
    located = judged.steps
    places = {one.commit: place for place, one in reversed(list(enumerate(points)))}
    place = places.get(decision.head)
    if place is None:
        history = queries.series_history(session, decision.series_id, without_sweeps=True)
        yield _of_missing_commit(decision, point, points, located, history)
        return
    worse = [step for step in located if step.verdict == decision.verdict]
    nearest = min(worse, key=lambda step: abs(step.index - place), default=None)
    apart = _NEARBY + 1 if nearest is None else nearest.index - place
    if nearest is None or abs(apart) > _NEARBY:
        waiting = (one.change for one in judged.found.waiting)
        # An earlier version reported what may wait today.
        if any(
            abs(change.index - place) <= _NEARBY
            and (change.difference > 0) == (point.after > point.before)
            for change in waiting
        ):
            yield Standing((decision.base or "", decision.head))
            return
        newest = _newest_level(points, located)
        reason = judged.reason_without(place, point.before, point.after)
        if metric.is_back(point.before, newest):
            yield Standing(None, _returned(point.before, metric, points[-1].commit, reason), True)
        else:
            yield Standing(None, f"{reason}, by history alone")
        return
    for later in located:
        if later.index > nearest.index and metric.is_back(point.before, later.after):
            reason = _returned(point.before, metric, points[later.index].commit)
            yield Standing(None, reason, is_back=True)
            return
    # The return itself may need more results to be a step.
    newest = _newest_level(points, located)
    if len(points) - nearest.index > _NEWEST and metric.is_back(point.before, newest):
        reason = _returned(point.before, metric, points[-1].commit)
        yield Standing(None, reason, is_back=True)
        return
    moved = f"later results place the change {apart:+d} results from there" if apart else ""
    yield Standing(_range(points, nearest), moved)


def _of_missing_commit(
    decision: DecisionRow,
    point: queries.ChangePointRow,
    points: Sequence[HistoryPoint],
    located: Sequence[Step],
    history: Sequence[HistoryPoint],
) -> Standing:
    """The standing of a change whose commit is not among the analysed results."""
    own = (decision.base or "", decision.head)
    whole = {one.commit: one.epoch for one in history}
    if decision.head not in whole:
        gone = _gone(decision.head)
        size = abs(point.after - point.before) / 4
        same = [
            step
            for step in located
            if step.verdict == decision.verdict
            and max(abs(step.before - point.before), abs(step.after - point.after)) <= size
        ]
        if same:
            return Standing(_range(points, same[-1]), gone)
        # The commit that replaced it may have too few results for a change yet.
        newest = points[-1].median_us
        is_still_bad = abs(newest - point.after) < abs(newest - point.before)
        return Standing(own) if is_still_bad else Standing(None, gone)
    if whole[decision.head] == points[-1].epoch:
        return Standing(None, f"the level has stood for {len(points)} results: it is the level now")
    if len(points) >= _NEW_EPOCH:
        return Standing(
            None,
            f"{len(points)} results have another environment, whose levels are not comparable",
        )
    return Standing(own)


def _gone(sha: str) -> str:
    return f"{sha[:10]} is no longer on the line of history"


def _newest_level(points: Sequence[HistoryPoint], located: Sequence[Step]) -> float:
    start = max(located[-1].index if located else 0, len(points) - _NEWEST)
    return statistics.median(point.median_us for point in points[start:])


def _returned(level: float, metric: Metric, commit: str, reason: str = "") -> str:
    because = f" ({reason})" if reason else ""
    return (
        f"at the earlier level of {level:.6g} {metric.unit} at {commit[:10]}{because}, "
        "by history alone"
    )


def _range(points: Sequence[HistoryPoint], step: Step) -> Range:
    return points[step.index - 1].commit, points[step.index].commit


def _shipped(session: Session, alert: AlertRow) -> str:
    """Name the release that shipped an acknowledged change; empty: none did, or nobody saw it."""
    if alert.state != "acknowledged" or alert.bad.topo_order is None:
        return ""
    events = queries.alert_events(session, alert.id)
    seen = next(event for event in reversed(events) if event.state == "acknowledged")
    releases = queries.releases(session, project=alert.bad.project)
    for row in reversed(releases):
        is_after = row.topo_order is not None and row.topo_order >= alert.bad.topo_order
        if is_after and row.committed_at is not None and row.committed_at > seen.created_at:
            return f"acknowledged by {seen.person or 'flexq-bench'}, and shipped in {row.name}"
    return ""
