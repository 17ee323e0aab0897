"""Write releases: tags of stored commits."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from db.locking import lock_for_writing
from db.tables import Commit, Release


def store_releases(session: Session, tags: Mapping[str, str]) -> list[str]:
    """Store tags of stored commits; return the names of new and moved ones, sorted.

    tags: name -> sha. Tags of commits that are not stored are ignored: nothing was measured there.
    """
    lock_for_writing(session.connection())
    shas = set(tags.values())
    clean = select(Commit.sha, Commit.id).where(Commit.sha.in_(shas), ~Commit.dirty)
    commits = {row.sha: row.id for row in session.execute(clean)}
    known = {row.name: row.commit_id for row in session.execute(select(*_COLUMNS))}
    changed = []
    for name, sha in sorted(tags.items()):
        commit_id = commits.get(sha)
        if commit_id is None or known.get(name) == commit_id:
            continue
        if name in known:
            moved = update(Release).where(Release.name == name).values(commit_id=commit_id)
            session.execute(moved)
        else:
            session.execute(insert(Release).values(name=name, commit_id=commit_id))
        changed.append(name)
    return changed


_COLUMNS = (Release.name, Release.commit_id)
