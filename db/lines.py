"""Lines of history: the order of a project's commits, by ancestry, on its branches.

The main line has the commits that the main branch reaches, but for those that were measured on a
branch and then merged by a merge commit: they stay on that branch's line, as main never stood there
(its first parents don't lead to them). A parent's place is before its child's, and a merged
branch's commits are before the merge (post-order, first parents first), so that a longer main
branch only appends. Another branch has its own commits, after the fork position. What no branch
reaches any more (a rebase) is marked as orphaned, and has no place.

Commits whose relation to the tip is unknown or none (no clone, a shallow clone, a new root) are
joined to the line by time, each after its known ancestors. The places of measured commits are
stored, and are computed again whenever a commit, a parent or a tip arrives; readers only sort.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session, aliased

from flexq_bench.db.ancestry import MAIN_NAMES, Ancestry, KnownHistory, Parents, Tip
from flexq_bench.db.dialects import insert_rows, lock_for_writing
from flexq_bench.db.tables import Branch, BranchCommit, Commit, CommitParent, Run

_EPOCH = datetime.min.replace(tzinfo=UTC)


def known_history(session: Session, project: str) -> KnownHistory:
    """Return what is stored of a project's history."""
    branches = session.scalars(select(Branch).where(Branch.project == project)).all()
    child, node = aliased(CommitParent), aliased(CommitParent)
    is_parent = child.project == project, child.parent_sha == CommitParent.sha
    is_known = node.project == project, node.sha == CommitParent.parent_sha
    edges = select(CommitParent.sha).where(CommitParent.project == project)
    heads = edges.where(~select(child.id).where(*is_parent).exists()).distinct()
    ends = (
        select(CommitParent.parent_sha)
        .where(CommitParent.project == project, CommitParent.parent_sha.is_not(None))
        .where(~select(node.id).where(*is_known).exists())
        .distinct()
    )
    return KnownHistory(
        main=next((branch.name for branch in branches if branch.is_main), ""),
        tips={
            branch.name: Tip(branch.tip_sha, branch.tip_at or _EPOCH)
            for branch in branches
            if branch.tip_sha is not None and branch.closed_at is None
        },
        heads=tuple(session.scalars(heads)),
        open_ends=tuple(sha for sha in session.scalars(ends) if sha is not None),
    )


def store_ancestry(session: Session, ancestry: Ancestry, *, at: datetime) -> None:
    """Store what a clone knows, and place the project's commits anew. at: when it was read."""
    lock_for_writing(session.connection())
    project = ancestry.project
    is_new = bool(add_parents(session, project, ancestry.parents))
    stored = {row.name: row for row in session.scalars(_branches(project))}
    if ancestry.main and ancestry.main not in stored and "" in stored:
        _set(session, stored[""], name=ancestry.main)
        stored[ancestry.main] = stored.pop("")
    if ancestry.main and ancestry.main not in stored:
        stored[ancestry.main] = _new_branch(session, project, ancestry.main)
    for name, tip in ancestry.tips.items():
        if name not in stored:
            stored[name] = _new_branch(session, project, name)
        branch = stored[name]
        if (branch.tip_sha, branch.closed_at) != (tip.sha, None) and not _is_older(
            session, branch, tip
        ):
            _set(session, branch, tip_sha=tip.sha, tip_at=tip.at, closed_at=None)
            is_new = True
    for name in ancestry.deleted:
        if name in stored and stored[name].closed_at is None and not stored[name].is_main:
            _set(session, stored[name], closed_at=at)
    if ancestry.main:
        for name, branch in stored.items():
            if branch.is_main is not (name == ancestry.main):
                _set(session, branch, is_main=name == ancestry.main, fork_position=None)
                is_new = True
    if is_new:
        place_commits(session, project, at=at)


def _is_older(session: Session, branch: Branch, tip: Tip) -> bool:
    """Return True if a clone that lacks the stored tip of a branch is behind it."""
    if tip.is_certain or branch.tip_sha is None or branch.tip_at is None:
        return False
    graph = _Graph(session, branch.project, {})
    return tip.at < branch.tip_at or tip.sha in graph.order(branch.tip_sha)


def add_parents(session: Session, project: str, parents: Parents) -> int:
    """Store the parents of commits, and return the number of new rows.

    Those of a commit that has some stored are left unchanged.
    """
    shas = list(parents)
    known: set[str] = set()
    for start in range(0, len(shas), 500):
        query = select(CommitParent.sha).where(CommitParent.project == project)
        known |= set(session.scalars(query.where(CommitParent.sha.in_(shas[start : start + 500]))))
    rows = [
        {"project": project, "sha": sha, "number": number, "parent_sha": parent}
        for sha, shas_of_parents in parents.items()
        if sha not in known
        for number, parent in enumerate(shas_of_parents or (None,))
    ]
    insert_rows(
        session.connection(), CommitParent.metadata.tables[CommitParent.__tablename__], rows
    )
    return len(rows)


def place_commits(session: Session, project: str, *, at: datetime) -> None:
    """Compute the places of a project's commits on its lines, and store those that changed."""
    lock_for_writing(session.connection())
    commits = _commits(session, project)
    branches = list(session.scalars(_branches(project)))
    graph = _Graph(session, project, commits)
    main = _main_branch(session, project, branches, commits)
    line = graph.order(main.tip_sha)
    if not commits.keys() & line and (measured := _most_measured(branches, graph, commits)):
        main, line = measured
    on_main = set(line)
    merged = _merged(main, branches, line, commits, graph)
    line = [sha for sha in line if sha not in merged]
    others = {b.id: b for b in branches if b is not main}
    own = {b: graph.order(others[b].tip_sha, without=on_main - merged.keys()) for b in others}
    on_branch = {sha for order in own.values() for sha in order}

    joined: dict[int, list[str]] = defaultdict(list)  # by branch: commits placed by time
    orphans = set()
    of_name = {branch.name: branch for branch in branches}
    for sha, commit in commits.items():
        if sha in merged and sha not in on_branch:
            joined[merged[sha].id].append(sha)
        if sha in on_main:
            continue
        meets = graph.meets(sha, on_main)
        if sha in on_branch and (commit.position is None or meets):
            continue
        named = of_name.get(commit.branch) or main
        if named is not main and (named.tip_sha is None or not meets):
            joined[named.id].append(sha)
        elif meets or commit.orphaned_at is not None:
            orphans.add(sha)
        else:
            joined[main.id].append(sha)

    positions = _positions(line, joined[main.id], commits, graph)
    note = _note(main, line, positions, orphans, commits, graph)
    if note:
        _set(session, main, note=note, noted_at=at)
    changes = []
    for sha, commit in commits.items():
        orphaned_at = (commit.orphaned_at or at) if sha in orphans else None
        if (commit.position, commit.orphaned_at) != (positions.get(sha), orphaned_at):
            ids = {"position": positions.get(sha), "orphaned_at": orphaned_at}
            changes += [{"id": commit_id, **ids} for commit_id in commit.ids]
    if changes:
        session.execute(update(Commit), changes)
    for branch_id, branch in others.items():
        commits_of_branch = (*own[branch_id], *joined[branch_id])
        forks = graph.forks(commits_of_branch, positions)
        fork = max((positions[sha] for sha in forks), default=None)
        places = _positions(own[branch_id], joined[branch_id], commits, graph, after=fork or 0)
        _store_branch(session, branch, fork, places, commits)
    # As its own branch, this line has nothing after the fork.
    _store_branch(session, main, max(positions.values(), default=None), {}, commits)


@dataclass(slots=True)
class _Measured:
    """A stored commit: the ids of its rows, with and without changes; key: its time."""

    ids: list[int]
    key: tuple[datetime, datetime, int]
    hint: int | None
    branch: str
    position: int | None
    orphaned_at: datetime | None
    parent: str | None


def _commits(session: Session, project: str) -> dict[str, _Measured]:
    first_run = select(Run.commit_id, func.min(Run.created_at)).group_by(Run.commit_id)
    run_at = {row[0]: row[1] for row in session.execute(first_run)}
    columns = (
        *(Commit.id, Commit.sha, Commit.topo_order, Commit.branch, Commit.position),
        *(Commit.orphaned_at, Commit.parent_sha, Commit.committed_at),
    )
    commits: dict[str, _Measured] = {}
    query = select(*columns).where(Commit.project == project).order_by(Commit.dirty, Commit.id)
    for row in session.execute(query):
        if row.sha in commits:
            commits[row.sha].ids.append(row.id)
            continue
        measured_at = run_at.get(row.id) or row.committed_at or _EPOCH
        key = (row.committed_at or measured_at, measured_at, row.id)
        commits[row.sha] = _Measured(
            [row.id], key, row.topo_order, row.branch, row.position, row.orphaned_at, row.parent_sha
        )
    return commits


class _Graph:
    """The stored parents of a project's commits."""

    def __init__(self, session: Session, project: str, commits: Mapping[str, _Measured]) -> None:
        query = (
            select(CommitParent.sha, CommitParent.parent_sha)
            .where(CommitParent.project == project)
            .order_by(CommitParent.sha, CommitParent.number)
        )
        self._parents: dict[str, list[str]] = {}
        for sha, parent in session.execute(query):
            known = self._parents.setdefault(sha, [])
            if parent is not None:
                known.append(parent)
        for sha, commit in commits.items():  # of records that name the first parent only
            if commit.parent is not None:
                self._parents.setdefault(sha, [commit.parent])
        self._meets: dict[str, bool] = {}
        self._seen: set[str] = set()  # the keys of _meets

    def parents(self, sha: str) -> Sequence[str]:
        return self._parents.get(sha, ())

    def is_root(self, sha: str) -> bool:
        return self._parents.get(sha) == []

    def order(self, tip: str | None, *, without: set[str] | None = None) -> list[str]:
        """Return the commits that a tip reaches, parents before children, first parents first."""
        seen = set(without or ())
        return [] if tip is None else list(_post_order((tip,), self.parents, seen))

    def first_parents(self, tip: str | None, seen: Collection[str]) -> set[str]:
        """Return a tip, its first parent and so on, up to a commit that was seen."""
        firsts: set[str] = set()
        while tip is not None and tip not in firsts and tip not in seen:
            firsts.add(tip)
            tip = next(iter(self.parents(tip)), None)
        return firsts

    def meets(self, sha: str, line: set[str]) -> bool:
        """Return True if a commit has a known ancestor on a line."""
        if not self._meets:
            self._meets, self._seen = dict.fromkeys(line, True), set(line)
        for commit in _post_order((sha,), self.parents, self._seen):
            self._meets[commit] = any(self._meets.get(parent) for parent in self.parents(commit))
        return self._meets[sha]

    def forks(self, own: Sequence[str], positions: Mapping[str, int]) -> Iterator[str]:
        """Yield the nearest measured commits of the main line that a branch's own commits reach."""
        seen = set(own)
        stack = [parent for sha in own for parent in self.parents(sha) if parent not in seen]
        while stack:
            sha = stack.pop()
            if sha in seen:
                continue
            seen.add(sha)
            if sha in positions:
                yield sha
            else:
                stack += self.parents(sha)


def _post_order(tips: Iterable[str], parents: Any, seen: set[str]) -> Iterator[str]:
    """Yield what the tips reach, apart from `seen`, each commit after its parents."""
    for tip in tips:
        stack = [(tip, iter(parents(tip)))] if tip not in seen else []
        seen.add(tip)
        while stack:
            sha, remaining = stack[-1]
            for parent in remaining:
                if parent not in seen:
                    seen.add(parent)
                    stack.append((parent, iter(parents(parent))))
                    break
            else:
                stack.pop()
                yield sha


def _positions(
    line: Sequence[str],
    joined: Sequence[str],
    commits: Mapping[str, _Measured],
    graph: _Graph,
    *,
    after: int = 0,
) -> dict[str, int]:
    """Return the places of the measured commits of a line, and of those joined to it by time.

    Distances along the line count all of its commits, measured or not. after: the place before it.
    """
    places = {sha: place for place, sha in enumerate(line, start=1) if sha in commits}
    # Counts of earlier versions are an ancestry of their own.
    hints = {sha: hint for sha in joined if (hint := commits[sha].hint) is not None}
    counted = sorted(hints, key=lambda sha: (hints[sha], commits[sha].key))
    before: dict[str, str] = {}
    for chain in (list(places), counted):
        before |= dict(zip(chain[1:], chain, strict=False))
    is_on_line = set(line)

    def ancestors(sha: str) -> Sequence[str]:
        chain = (before[sha],) if sha in before else ()
        if sha in is_on_line:
            return chain
        return (*chain, *(parent for parent in graph.parents(sha) if parent not in is_on_line))

    ordered = sorted((*joined, *places), key=lambda sha: (commits[sha].key, sha in is_on_line))
    place_in_chain = {**places, **hints}
    positions: dict[str, int] = {}
    newest = after
    for sha in _post_order(ordered, ancestors, set()):
        if sha not in places and sha not in hints and sha not in commits:
            continue
        own = place_in_chain.get(sha)
        least = newest + 1
        if own is not None and before.get(sha) in positions:
            least = max(least, positions[before[sha]] + own - place_in_chain[before[sha]])
        elif own is not None and not positions:
            least = after + own
        positions[sha] = newest = least
    return positions


def _note(
    main: Branch,
    line: Sequence[str],
    positions: Mapping[str, int],
    orphans: set[str],
    commits: Mapping[str, _Measured],
    graph: _Graph,
) -> str:
    """Describe a rewrite of the main branch that left commits of its line out; empty: none."""
    name = main.name or "the main branch"
    new = [sha for sha in orphans if commits[sha].position is not None]
    notes = []
    if new:
        shas = ", ".join(sorted(sha[:10] for sha in new)[:3]) + (", …" if len(new) > 3 else "")
        notes.append(
            f"{name} was rewritten: no branch reaches {len(new)} measured commits any more, which "
            f"are left out of its history ({shas})"
        )
    on_line = set(line)
    apart = [sha for sha in positions if sha not in on_line and commits[sha].position is not None]
    was_here = any(commits[sha].position is not None for sha in on_line & commits.keys())
    if apart and line and graph.is_root(line[0]) and not was_here:
        notes.append(
            f"{name} has a new root, {line[0][:10]}: its {len(apart)} measured commits from before "
            "are joined to it by time"
        )
    return "; ".join(notes)


def _store_branch(
    session: Session,
    branch: Branch,
    fork: int | None,
    places: Mapping[str, int],
    commits: Mapping[str, _Measured],
) -> None:
    if branch.fork_position != fork:
        _set(session, branch, fork_position=fork)
    wanted = {commit_id: place for sha, place in places.items() for commit_id in commits[sha].ids}
    query = select(BranchCommit.commit_id, BranchCommit.position)
    stored = {
        row.commit_id: row.position
        for row in session.execute(query.where(BranchCommit.branch_id == branch.id))
    }
    if wanted != stored:
        session.execute(delete(BranchCommit).where(BranchCommit.branch_id == branch.id))
        rows = [{"branch_id": branch.id, "commit_id": c, "position": p} for c, p in wanted.items()]
        if rows:
            session.execute(insert(BranchCommit), rows)


def _branches(project: str) -> Any:
    return select(Branch).where(Branch.project == project).order_by(Branch.id)


def _main_branch(
    session: Session, project: str, branches: list[Branch], commits: Mapping[str, _Measured]
) -> Branch:
    """Return the main branch; make rows of it and of the other branches that commits name."""
    names = {commit.branch for commit in commits.values() if commit.branch}
    main = next((branch for branch in branches if branch.is_main), None)
    if main is None:
        main = _new_branch(session, project, "", is_main=True)
        branches.append(main)
    if not main.name:
        usual = [name for name in MAIN_NAMES if name in names]
        taken = {branch.name for branch in branches}
        counted = Counter(commit.branch for commit in commits.values())
        name = (
            usual[0]
            if usual
            else ("" if "" in counted or not counted else counted.most_common(1)[0][0])
        )
        if name and name not in taken:
            _set(session, main, name=name)
    for name in sorted(names - {branch.name for branch in branches}):
        branches.append(_new_branch(session, project, name))
    return main


def _merged(
    main: Branch,
    branches: Sequence[Branch],
    line: Sequence[str],
    commits: Mapping[str, _Measured],
    graph: _Graph,
) -> dict[str, Branch]:
    """Return the measured commits of a line that are results of the branches merged into it.

    Each with the branch, by sha. They were measured on another branch, and no first parents lead
    from the tip to them. Of those measured on an unknown branch, it is those that were never on
    main, and to which the first parents of another branch lead.
    """
    firsts = graph.first_parents(main.tip_sha, {})
    others: dict[str, Branch] = dict.fromkeys(firsts, main)
    for branch in branches:
        others |= dict.fromkeys(graph.first_parents(branch.tip_sha, others), branch)
    of_name = {"": main, **{branch.name: branch for branch in branches}}
    merged = {}
    for sha in commits.keys() & set(line) - firsts:
        commit = commits[sha]
        is_new = not commit.branch and main.name and commit.position is None
        branch = others.get(sha, main) if is_new else of_name[commit.branch]
        if branch is not main:
            merged[sha] = branch
    return merged


def _most_measured(
    branches: Sequence[Branch], graph: _Graph, commits: Mapping[str, _Measured]
) -> tuple[Branch, list[str]] | None:
    """Return the branch that reaches the most measured commits, and its line; None: none does.

    It is the main line until something of the main branch is measured.
    """
    lines = ((branch, graph.order(branch.tip_sha)) for branch in branches if branch.tip_sha)
    counted = [(len(commits.keys() & line), branch, line) for branch, line in lines]
    count, branch, line = max(counted, key=lambda candidate: candidate[0], default=(0, None, []))
    return (branch, line) if branch is not None and count else None


def _new_branch(session: Session, project: str, name: str, *, is_main: bool = False) -> Branch:
    branch = Branch(project=project, name=name, is_main=is_main, note="")
    session.add(branch)
    session.flush()
    return branch


def _set(session: Session, branch: Branch, **values: Any) -> None:
    for name, value in values.items():
        setattr(branch, name, value)
    session.flush()
