"""Query for releases."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from flexq_bench.db.tables import Commit, Release


@dataclass(frozen=True, slots=True)
class ReleaseRow:
    """A tag and its commit. topo_order None: the commit is not in a git tree."""

    name: str
    sha: str
    topo_order: int | None


def releases(session: Session, *, project: str = "") -> list[ReleaseRow]:
    """Return releases, newest first by ancestry; those without topo_order come last.

    project: name of an external project; empty: this repository.
    """
    query = (
        select(Release.name, Commit.sha, Commit.topo_order)
        .join(Commit, Release.commit_id == Commit.id)
        .where(Commit.project == project)
        .order_by(Commit.topo_order.desc().nulls_last(), Release.name.desc())
    )
    return [ReleaseRow(*row) for row in session.execute(query)]
