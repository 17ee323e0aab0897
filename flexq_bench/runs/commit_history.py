"""Store what a clone knows of a commit's history, before its results are stored."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from functools import cache

from flexq_bench.db.engine import Database
from flexq_bench.db.lines import known_history, store_ancestry
from flexq_bench.db.records import CommitInfo
from flexq_bench.repository.ancestry import read_history
from flexq_bench.repository.git import GitError
from flexq_bench.repository.provenance import clone_of
from flexq_bench.runs.transactions import run_transaction

log = logging.getLogger(__name__)


def store_history(database: Database, *commits: CommitInfo) -> str:
    """Store the ancestry and the branches that the clone of commits adds; return a note on them.

    All commits are of one project, and of one clone.

    The note says what is missing and how commits are ordered instead; empty: nothing is missing, or
    there is no clone. Raises InfrastructureError if the database stays unavailable.
    """
    cloned = [commit for commit in commits if clone_of(commit) is not None]
    root = clone_of(cloned[0]) if cloned else None
    if root is None:
        return ""
    project = cloned[0].project
    known = run_transaction(database, lambda session: known_history(session, project))
    try:
        history = read_history(root, [commit.sha for commit in cloned], project, known)
    except GitError as error:
        log.debug("%s", error)
        return f"the history of {root} can't be read: commits are ordered by their times"
    at = datetime.now(UTC)
    run_transaction(database, lambda session: store_ancestry(session, history.ancestry, at=at))
    return history.note


@cache
def warn_once(note: str) -> None:
    """Log a note as a warning, for all runs of this process once."""
    log.warning("%s", note)
