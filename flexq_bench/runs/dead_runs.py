"""Runs that are stored as running, whose process on this host has ended."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.queries import OwnedRun
from flexq_bench.db.store import end_runs_of
from flexq_bench.runs.owner_process import is_dead

log = logging.getLogger(__name__)


def end_dead_runs(database: Database) -> list[OwnedRun]:
    """Mark runs whose processes were killed on this host as interrupted, and return them."""
    dead = dead_runs(database)
    for run in dead:
        assert run.owner is not None
        with database.session() as session:
            end_runs_of(session, run.owner, at=datetime.now(UTC))
        log.warning("run %s is interrupted: its process was killed", run.uuid[:8])
    return dead


def dead_runs(database: Database) -> list[OwnedRun]:
    """Runs with status `running` whose process on this host has ended."""
    with database.session() as session:
        running = queries.owned_runs(session)
    return [run for run in running if run.owner is not None and is_dead(run.owner)]
