"""Benchmarks whose unit or better direction changed, so that another series goes on in their place.

A unit that can be converted needs none of this: its results are stored in the unit of the series.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flexq_bench.db import queries
from flexq_bench.db.engine import Session
from flexq_bench.db.queries import HistoryPoint, SeriesName

_SHA = 10


@dataclass(frozen=True, slots=True)
class SeriesBreak:
    """A series that ends, and the one that goes on. last, first: the results at the break."""

    ended: SeriesName
    begun: SeriesName
    last: HistoryPoint
    first: HistoryPoint

    @property
    def text(self) -> str:
        kinds = []
        if self.ended.unit != self.begun.unit:
            kinds.append("its unit changed, and can't be converted")
        if self.ended.direction != self.begun.direction:
            kinds.append("what is better was reversed")
        return (
            f"series {self.begun.id} is not compared with series {self.ended.id} of the same "
            f"benchmark ({' and '.join(kinds)}): {_shown(self.last, self.ended)}, then "
            f"{_shown(self.first, self.begun)}"
        )


def series_breaks(session: Session, series_ids: Iterable[int]) -> list[SeriesBreak]:
    """Return the breaks before or after these series, one for each pair."""
    pairs = {tuple(sorted(pair)) for pair in queries.series_of_other_units(session, series_ids)}
    if not pairs:
        return []
    names = {series.id: series for series in queries.series_names(session)}
    breaks = []
    for pair in sorted(pairs):
        histories = {series: queries.series_history(session, series) for series in pair}
        if not all(histories.values()):
            continue
        started = {
            series: min(p.created_at for p in points) for series, points in histories.items()
        }
        ended, begun = sorted(pair, key=lambda series: started[series])
        first = min(histories[begun], key=lambda point: point.created_at)
        before = [p for p in histories[ended] if p.created_at <= first.created_at]
        breaks.append(SeriesBreak(names[ended], names[begun], before[-1], first))
    return breaks


def _shown(point: HistoryPoint, series: SeriesName) -> str:
    return (
        f"{point.median_us:.6g} {series.unit} ({series.direction} is better) at "
        f"{point.commit[:_SHA]}"
    )
