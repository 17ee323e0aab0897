"""Queries for commits and releases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Label, select
from sqlalchemy.orm import Session

from flexq_bench.db.queries.rows import columns_of, rows_of
from flexq_bench.db.tables import Commit, Release


@dataclass(frozen=True, slots=True)
class ReleaseRow:
    """A tag and its commit. topo_order: as of CommitRow. committed_at None: unknown."""

    name: str
    sha: str
    topo_order: int | None
    committed_at: datetime | None


def releases(session: Session, *, project: str = "") -> list[ReleaseRow]:
    """Return releases, newest first by ancestry; those that are not on the main line come last.

    project: name of an external project; empty: this repository.
    """
    query = (
        select(*columns_of(ReleaseRow, Release, Commit, topo_order=Commit.position))
        .join(Commit, Release.commit_id == Commit.id)
        .where(Commit.project == project)
        .order_by(Commit.position.desc().nulls_last(), Release.name.desc())
    )
    return rows_of(session, ReleaseRow, query)


@dataclass(frozen=True, slots=True)
class CommitRow:
    """A commit for display. project: as in CommitInfo.

    topo_order: place on the main line, in order of ancestry (db.lines); None: it is not on it.
    """

    sha: str
    topo_order: int | None
    subject: str
    author: str
    project: str = ""


def commits_between(
    session: Session, after: int, up_to: int, *, project: str = ""
) -> list[CommitRow]:
    """Return stored commits of the main line with after < topo_order <= up_to, oldest first.

    project: name of an external project; empty: this repository. Commits without any measurement
    are not stored.
    """
    query = (
        select(*commit_columns())
        .where(
            Commit.position > after,
            Commit.position <= up_to,
            ~Commit.dirty,
            Commit.project == project,
        )
        .order_by(Commit.position, Commit.sha)
    )
    return rows_of(session, CommitRow, query)


def recent_commits(
    session: Session, *, limit: int, prefixes: Sequence[str] = (), project: str = ""
) -> list[CommitRow]:
    """Return the newest clean commits of the main line, then others, then one per sha prefix.

    project: name of an external project; empty: this repository.
    """
    query = select(*commit_columns()).where(~Commit.dirty, Commit.project == project)
    newest = query.order_by(Commit.position.desc().nulls_last(), Commit.id.desc())
    rows = rows_of(session, CommitRow, newest.limit(limit))
    for prefix in prefixes:
        matching = query.where(Commit.sha.startswith(prefix, autoescape=True)).limit(1)
        rows += rows_of(session, CommitRow, matching)
    return list(dict.fromkeys(rows))


def commit_row(session: Session, sha: str, *, project: str = "") -> CommitRow | None:
    """Return a clean commit; None: it is not stored."""
    query = select(*commit_columns()).where(
        Commit.sha == sha, Commit.project == project, ~Commit.dirty
    )
    return next(iter(rows_of(session, CommitRow, query)), None)


def commit_columns() -> list[Label[Any]]:
    """Return the columns of a CommitRow."""
    return columns_of(CommitRow, Commit, topo_order=Commit.position)
