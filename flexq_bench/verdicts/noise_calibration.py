"""A/A calibration: commits compared with themselves give noise and the false-alarm rate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from datetime import datetime, timedelta

from flexq_bench.db import queries
from flexq_bench.db.decisions import FalseAlarmInfo, NoiseInfo, add_false_alarm_rate, add_noise
from flexq_bench.db.engine import Session
from flexq_bench.db.queries import CanaryRow
from flexq_bench.stats import proportion_interval
from flexq_bench.verdicts.evidence import Evidence
from flexq_bench.verdicts.noise import noise_levels
from flexq_bench.verdicts.verdict import Verdict

# Period of canaries that count for both; earlier ones ran on other machines.
WINDOW = timedelta(days=90)
CONFIDENCE = 0.95
_ALARMS = (Verdict.SLOWER, Verdict.FASTER)
_UNJUDGED = (Verdict.NO_DATA, Verdict.INCORRECT)


def update_calibration(session: Session, *, at: datetime, new: Collection[str]) -> None:
    """Store the noise of the series with new canaries, and the false-alarm rate of all, up to `at`.

    new: uuids of decisions. Repeating it changes nothing.

    A canary with the verdict slower or faster is a false alarm. It opens no alert because its
    machine code is the same, but with other code it would have.
    """
    rows = queries.canaries(session, since=at - WINDOW, until=at)
    judged = [row for row in rows if row.verdict not in _UNJUDGED]
    by_series: dict[int, list[CanaryRow]] = defaultdict(list)
    for row in judged:
        by_series[row.series_id].append(row)
    for series_id, canaries in by_series.items():
        if any(row.uuid in new for row in canaries):
            _write_noise(session, series_id, canaries, at)
    if judged:
        _write_rate(session, judged)


def _write_noise(session: Session, series_id: int, canaries: list[CanaryRow], at: datetime) -> None:
    comparisons = [
        Evidence.from_dict(queries.decision_evidence(session, row.uuid)).comparison
        for row in canaries
    ]
    levels = noise_levels(comparisons)
    if levels is None:
        return
    add_noise(
        session,
        NoiseInfo(
            series_id=series_id,
            computed_at=at,
            decisions=tuple(row.uuid for row in canaries),
            placements=levels.placements,
            blocks=levels.blocks,
            block_sigma=levels.block,
            placement_sigma=levels.placement,
            comparison_sigma=levels.comparison,
            estimate_sigma=levels.estimate,
            noise_floor=levels.noise_floor,
            smallest_step=levels.smallest_step,
        ),
    )


def _write_rate(session: Session, canaries: list[CanaryRow]) -> None:
    alarms = sum(row.verdict in _ALARMS for row in canaries)
    rate = proportion_interval(alarms, len(canaries), confidence=CONFIDENCE)
    times = [row.created_at for row in canaries]
    add_false_alarm_rate(
        session,
        FalseAlarmInfo(
            since=min(times),
            until=max(times),
            decisions=tuple(row.uuid for row in canaries),
            alarms=alarms,
            rate=rate.estimate,
            low=rate.low,
            high=rate.high,
            confidence=CONFIDENCE,
        ),
    )
