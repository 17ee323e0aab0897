"""Counts of the results of runs, kept in memory: a page of 100 runs may have a million results."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from flexq_bench.db import queries
from flexq_bench.db.engine import Database, Session
from flexq_bench.db.queries import Filters, Page, RunCounts

# Results are only added, except that an import may replace some; counts are then this old, at most.
_MAX_AGE_S = 300.0
_FILLED_RUNS, _FILLED_PAGE = 1000, 20
_MAX_RUNS = 20_000  # some hundred bytes each


class RunCountsCache:
    """Counts of runs by id, recounted for the runs that got planned cases or results since.

    Safe in threads. Writers of a database take turns, so higher ids are of later transactions.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[int, tuple[float, RunCounts]] = {}
        self._rows = (0, 0)

    def fill(self, database: Database) -> None:
        """Count the newest runs, so that the first readers need not wait for it."""
        for start in range(0, _FILLED_RUNS, _FILLED_PAGE):
            with database.session() as session:
                page = Page(_FILLED_PAGE, offset=start)
                rows, _ = queries.runs_page(session, Filters(), page, count=self)
            if len(rows) < _FILLED_PAGE:
                break

    def __call__(self, session: Session, run_ids: Sequence[int]) -> Mapping[int, RunCounts]:
        rows = queries.rows_stored(session)
        now = time.monotonic()
        with self._lock:
            if rows != self._rows:
                shrunk = any(new < old for new, old in zip(rows, self._rows, strict=True))
                changed = (
                    set(self._counts)
                    if shrunk or not self._counts
                    else queries.runs_changed_since(session, self._rows)
                )
                for run_id in changed:
                    self._counts.pop(run_id, None)
                self._rows = rows
            known = {
                run_id: counts
                for run_id in run_ids
                for counted_at, counts in [self._counts.get(run_id, (0.0, None))]
                if counts is not None and now - counted_at < _MAX_AGE_S
            }
        unknown = [run_id for run_id in run_ids if run_id not in known]
        if unknown:
            counted = queries.run_counts(session, unknown)
            with self._lock:
                if rows == self._rows:  # else another thread saw later rows
                    self._counts |= {run_id: (now, counts) for run_id, counts in counted.items()}
                while len(self._counts) > _MAX_RUNS:
                    del self._counts[next(iter(self._counts))]
            known |= counted
        return known
