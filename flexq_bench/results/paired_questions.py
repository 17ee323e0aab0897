"""Results whose samples are answers to questions, compared question by question.

A difference of two scores has the uncertainty of the few questions that only one of two commits got
right, which is far less than that of the scores themselves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from flexq_bench.db import queries
from flexq_bench.db.engine import Session
from flexq_bench.db.queries import HistoryPoint, ProjectSeries
from flexq_bench.stats.bootstrap import Interval
from flexq_bench.stats.paired import is_clear, item_difference, mean_difference_interval

BETTER, WORSE, UNCLEAR = "better", "worse", "no clear difference"
_EARLIER = 20  # commits among which the last one with the same questions is looked for
_SEED = 59
_SHA = 10


@dataclass(frozen=True, slots=True)
class PairedVerdict:
    """The newest result of a series against the last earlier one with the same questions.

    difference: of the mean, head minus base, with its 95 % interval. lost, won: questions whose
    value became worse, or better.
    """

    series: ProjectSeries
    base: str
    head: str
    questions: int
    difference: Interval
    lost: int
    won: int
    verdict: str

    @property
    def text(self) -> str:
        low, high = self.difference.low, self.difference.high
        return (
            f"{self.series.kernel} {self.series.metric}: {self.difference.estimate:+.4g} "
            f"({low:+.4g} to {high:+.4g}) from {self.base[:_SHA]} to {self.head[:_SHA]}, "
            f"{self.lost} of {self.questions} questions worse, {self.won} better: {self.verdict}"
        )


def paired_verdicts(session: Session, series_ids: Collection[int]) -> list[PairedVerdict]:
    """Compare the newest results of series by question; series without such samples are left out.

    Right and wrong answers by McNemar's counts, other values by a bootstrap over questions.
    """
    ids = sorted(series_ids)
    histories = queries.recent_histories(session, ids, results=_EARLIER)
    verdicts = (
        _compared(session, series, histories[series.id])
        for series in queries.project_series(session, ids)
        if series.id in histories
    )
    return [verdict for verdict in verdicts if verdict is not None]


def _compared(
    session: Session, series: ProjectSeries, points: list[HistoryPoint]
) -> PairedVerdict | None:
    by_commit = {point.commit: point for point in points}  # the last result of each
    *earlier, newest = by_commit.values()
    asked = queries.asked_questions(session, [point.measurement for point in by_commit.values()])
    same = asked[newest.measurement]
    base = next((result for result in reversed(earlier) if asked[result.measurement] == same), None)
    if not same or base is None:
        return None
    before, after = (
        [value for part in queries.samples_of(session, result.measurement) for value in part]
        for result in (base, newest)
    )
    if len(before) != len(after) or len(before) < 2:
        return None  # its samples were pruned
    if {*before, *after} <= {0.0, 1.0}:
        difference = item_difference(before, after).interval
    else:
        difference = mean_difference_interval(before, after, seed=_SEED)
    sign = 1 if series.direction == "higher" else -1
    gains = [sign * (new - old) for old, new in zip(before, after, strict=True)]
    verdict = UNCLEAR
    if is_clear(difference):
        verdict = BETTER if sign * difference.estimate > 0 else WORSE
    return PairedVerdict(
        series,
        base.commit,
        newest.commit,
        len(after),
        difference,
        lost=sum(gain < 0 for gain in gains),
        won=sum(gain > 0 for gain in gains),
        verdict=verdict,
    )
