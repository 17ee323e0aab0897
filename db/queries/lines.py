"""Lines of history as conditions of queries; db.lines computes the places of commits on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.orm import Session, aliased

from flexq_bench.db.errors import NotFoundError
from flexq_bench.db.queries.commits import CommitRow
from flexq_bench.db.tables import Branch, BranchCommit, Commit, CommitParent, Series


@dataclass(frozen=True, slots=True)
class Line:
    """SQL of a line of history: the place of a commit, and which commits are its members.

    is_own: joins the commit's row of BranchCommit; None: the main line, which needs none.
    """

    position: ColumnElement[Any]
    is_member: ColumnElement[bool]
    is_own: ColumnElement[bool] | None = None


MAIN_LINE = Line(Commit.position.expression, Commit.position.is_not(None))


def line_of(session: Session, series_id: int, branch: str | None = None) -> Line:
    """Return the line of a branch in the project of a series; branch None: the main line.

    Raises NotFoundError for an unknown branch.
    """
    stored = None
    if branch is not None:
        of_project = Branch.project == Series.project
        query = select(Branch).join(Series, of_project).where(Series.id == series_id)
        stored = session.scalar(query.where(Branch.name == branch))
        if stored is None:
            raise NotFoundError(f"no result of series {series_id} names a branch {branch!r}")
    if stored is None or stored.is_main:
        return MAIN_LINE
    own = BranchCommit.branch_id == stored.id, BranchCommit.commit_id == Commit.id
    return Line(
        func.coalesce(BranchCommit.position, Commit.position),
        or_(BranchCommit.position.is_not(None), Commit.position <= (stored.fork_position or 0)),
        and_(*own),
    )


def branch_names(session: Session, project: str) -> list[str]:
    """Return the branches of a project that have results of their own, main first, then by name."""
    has_results = select(BranchCommit.commit_id).where(BranchCommit.branch_id == Branch.id)
    query = select(Branch.name).where(
        Branch.project == project, or_(Branch.is_main, has_results.exists())
    )
    return list(session.scalars(query.order_by(Branch.is_main.desc(), Branch.name)))


def branch_of(session: Session, sha: str, project: str) -> str | None:
    """Return the branch whose line has a commit; None: the main line, or no line."""
    query = (
        select(Branch.name)
        .join(BranchCommit, BranchCommit.branch_id == Branch.id)
        .join(Commit, BranchCommit.commit_id == Commit.id)
        .where(Commit.sha == sha, Commit.project == project, Commit.position.is_(None))
        .order_by(Branch.closed_at.is_not(None), Branch.fork_position.desc())
    )
    return session.scalar(query.limit(1))


def is_ancestor(session: Session, sha: str, of: str, project: str) -> bool:
    """Return True if a commit reaches another one by its stored parents."""
    parents = select(CommitParent.parent_sha).where(CommitParent.project == project)
    reached = parents.where(CommitParent.sha == of).cte(recursive=True)
    further = parents.join(reached, CommitParent.sha == reached.c.parent_sha)
    reached = reached.union(further)
    return session.scalar(select(reached.c.parent_sha).where(reached.c.parent_sha == sha)) == sha


def comes_after(session: Session, sha: str, order: int | None, other: CommitRow) -> bool:
    """Return True if a commit has another of its project, by the main line or by ancestry.

    order: its place on the main line; None: it is not there.
    """
    if order is not None and other.topo_order is not None:
        return order > other.topo_order
    return is_ancestor(session, other.sha, sha, other.project)


def is_orphaned(session: Session, sha: str, project: str) -> bool:
    """Return True if no branch reaches a commit any more: it is left out of every history."""
    return bool(orphaned(session, [(sha, project)]))


def orphaned(session: Session, commits: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return those commits, by sha and project, that no branch reaches any more."""
    wanted = set(commits)
    query = select(Commit.sha, Commit.project).where(
        Commit.sha.in_([sha for sha, _ in wanted]), Commit.orphaned_at.is_not(None)
    )
    return {(sha, project) for sha, project in session.execute(query)} & wanted


def is_on_main(commit_id: ColumnElement[int]) -> ColumnElement[bool]:
    """Return the condition that a commit is on the main line of its project."""
    of_id = aliased(Commit)
    return select(of_id.id).where(of_id.id == commit_id, of_id.position.is_not(None)).exists()


def history_notes(session: Session, project: str, *, since: datetime) -> list[str]:
    """Return notes on rewrites of the main branch that were seen since a time."""
    query = select(Branch.note).where(
        Branch.project == project, Branch.note != "", Branch.noted_at >= since
    )
    return list(session.scalars(query))
