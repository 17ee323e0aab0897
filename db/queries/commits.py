"""Queries for commits and releases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from flexq_bench.db.queries.rows import columns_of, rows_of
from flexq_bench.db.tables import Commit, Release


@dataclass(frozen=True, slots=True)
class ReleaseRow:
    """A tag and its commit. topo_order None: the commit is not in a git tree.

    committed_at None: unknown.
    """

    name: str
    sha: str
    topo_order: int | None
    committed_at: datetime | None


def releases(session: Session, *, project: str = "") -> list[ReleaseRow]:
    """Return releases, newest first by ancestry; those without topo_order come last.

    project: name of an external project; empty: this repository.
    """
    query = (
        select(*columns_of(ReleaseRow, Release, Commit))
        .join(Commit, Release.commit_id == Commit.id)
        .where(Commit.project == project)
        .order_by(Commit.topo_order.desc().nulls_last(), Release.name.desc())
    )
    return rows_of(session, ReleaseRow, query)


@dataclass(frozen=True, slots=True)
class CommitRow:
    """A commit for display. topo_order None: not in a git tree. project: as in CommitInfo."""

    sha: str
    topo_order: int | None
    subject: str
    author: str
    project: str = ""


def commits_between(
    session: Session, after: int, up_to: int, *, project: str = ""
) -> list[CommitRow]:
    """Return stored commits with after < topo_order <= up_to, oldest first.

    project: name of an external project; empty: this repository. Commits without any measurement
    are not stored.
    """
    query = (
        select(Commit.sha, Commit.topo_order, Commit.subject, Commit.author)
        .where(
            Commit.topo_order > after,
            Commit.topo_order <= up_to,
            ~Commit.dirty,
            Commit.project == project,
        )
        .order_by(Commit.topo_order, Commit.sha)
    )
    return [CommitRow(*row) for row in session.execute(query)]


def recent_commits(
    session: Session, *, limit: int, prefixes: Sequence[str] = (), project: str = ""
) -> list[CommitRow]:
    """Return the newest clean commits by ancestry, then one commit per sha prefix.

    project: name of an external project; empty: this repository.
    """
    query = select(Commit.sha, Commit.topo_order, Commit.subject, Commit.author).where(
        ~Commit.dirty, Commit.project == project
    )
    newest = query.order_by(Commit.topo_order.desc().nulls_last(), Commit.id.desc()).limit(limit)
    rows = list(session.execute(newest))
    for prefix in prefixes:
        matching = query.where(Commit.sha.startswith(prefix, autoescape=True)).limit(1)
        rows += session.execute(matching)
    return list(dict.fromkeys(CommitRow(*row) for row in rows))
