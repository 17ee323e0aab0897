"""Current level of an alert's series, relative to the last good commit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from flexq_bench.db.queries import AlertRow
from flexq_bench.results.scoreboard import Change, change_of
from flexq_bench.results.stored_noise import StoredNoise
from flexq_bench.verdicts import Verdict

STILL_SLOW, RECOVERED, UNCLEAR = "still slow", "recovered", "unclear"
NOT_MEASURED = "not measured since"
_WORDS = {  # by verdict on latest / good, if lower is better
    Verdict.SLOWER: STILL_SLOW,
    Verdict.SAME: RECOVERED,
    Verdict.FASTER: RECOVERED,
    Verdict.AMBIGUOUS: UNCLEAR,
}
_REVERSED = {Verdict.SLOWER: Verdict.FASTER, Verdict.FASTER: Verdict.SLOWER}


@dataclass(frozen=True, slots=True)
class AlertLevel:
    """The current level of an alert's series.

    change: latest results over the newest ones up to the last good commit, within an epoch; None:
    there are no such pairs. words: its verdict. since: time of the latest result.
    """

    change: Change | None
    words: str
    since: datetime | None


def alert_level(
    alert: AlertRow, noise: StoredNoise, *, higher_is_better: Collection[int] = ()
) -> AlertLevel:
    """The level of an alert's series now. noise: of all of them, with their histories.

    higher_is_better: series in which a decrease is a regression. For an alert with series of both
    directions no mean change is defined: it is unclear.
    """
    good = None if alert.good is None else alert.good.topo_order
    bad = alert.bad.topo_order
    latest = {
        series_id: noise.histories[series_id][-1]
        for series_id in alert.series
        if noise.histories.get(series_id)
    }
    since = max((point.created_at for point in latest.values()), default=None)
    latest = {
        series_id: point
        for series_id, point in latest.items()
        if bad is not None and point.topo_order is not None and point.topo_order >= bad
    }
    if not latest or good is None:
        return AlertLevel(None, NOT_MEASURED, since)
    change = change_of(
        latest, noise, lambda point: point.topo_order is not None and point.topo_order <= good
    )
    higher = {series_id in higher_is_better for series_id in latest}
    if change is None or len(higher) > 1:
        return AlertLevel(None, UNCLEAR, since)
    verdict = _REVERSED.get(change.verdict, change.verdict) if True in higher else change.verdict
    return AlertLevel(change, _WORDS[verdict], since)


def series_of(alerts: Sequence[AlertRow]) -> set[int]:
    """Ids of the series of these alerts."""
    return {series for alert in alerts for series in alert.series}
