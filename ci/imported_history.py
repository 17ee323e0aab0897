"""Judging what an import changed: histories, alerts and their notifications."""

from __future__ import annotations

from collections.abc import Collection

from flexq_bench.ci.history_alerts import HistoryVerdicts, judge_histories
from flexq_bench.ci.notifications import events
from flexq_bench.db.engine import Database

_A_TRANSACTION = 100  # series; others wait for the writer's lock meanwhile


def judge_imported(
    database: Database, series_ids: Collection[int], *, alerting: bool = True
) -> HistoryVerdicts:
    """Judge series of other projects by their histories, in transactions that are short.

    Raises DatabaseError.
    """
    ids = sorted(series_ids)
    parts = []
    for start in range(0, len(ids), _A_TRANSACTION):
        with database.session() as session:
            part = ids[start : start + _A_TRANSACTION]
            verdicts = judge_histories(session, part, alerting=alerting)
            if alerting:
                events.add_history_events(session, verdicts)
            parts.append(verdicts)
    return HistoryVerdicts(
        sum(part.series for part in parts),
        sum(part.steps for part in parts),
        tuple(dict.fromkeys(alert for part in parts for alert in part.opened)),
        tuple(dict.fromkeys(alert for part in parts for alert in part.joined)),
        tuple(change for part in parts for change in part.changed),
        tuple(uuid for part in parts for uuid in part.improved),
    )
