"""Write releases: tags of stored commits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from flexq_bench.db.dialects import lock_for_writing
from flexq_bench.db.tables import Commit, Release


def store_releases(
    session: Session, tags: Mapping[str, str], *, project: str | None = None
) -> list[str]:
    """Store tags of stored commits; return the names of new and moved ones, sorted.

    tags: name -> sha. Tags of commits that are not stored are ignored: nothing was measured there.
    project: only commits of this project (empty: this repository); None: of every project that has
    them.
    """
    lock_for_writing(session.connection())
    clean = select(Commit.sha, Commit.project, Commit.id).where(
        Commit.sha.in_(set(tags.values())), ~Commit.dirty
    )
    if project is not None:
        clean = clean.where(Commit.project == project)
    commits: dict[str, list[Any]] = defaultdict(list)
    for row in session.execute(clean):
        commits[row.sha].append(row)
    stored = select(Release.id, Release.name, Release.commit_id, Commit.project).join(
        Commit, Release.commit_id == Commit.id
    )
    known = {(row.project, row.name): row for row in session.execute(stored)}
    changed = set()
    for name, sha in tags.items():
        for commit in commits[sha]:
            release = known.get((commit.project, name))
            values = {"name": name, "commit_id": commit.id}
            if release is None:
                session.execute(insert(Release).values(values))
            elif release.commit_id != commit.id:
                session.execute(update(Release).where(Release.id == release.id).values(values))
            else:
                continue
            changed.add(name)
    return sorted(changed)
