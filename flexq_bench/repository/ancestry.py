"""The history of a clone: parents of its commits, tips of its branches, and the branch measured."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexq_bench.db.ancestry import MAIN_NAMES, Ancestry, KnownHistory, Tip
from flexq_bench.repository.git import GitError, git_lines, git_output, parents_of, run_git, time_of

_MAX_BRANCHES = 1000  # of a clone, with the newest tips
# Variables of CI services: the source branch of a pull request, then the branch of a push.
_SOURCE_BRANCH = ("GITHUB_HEAD_REF", "CI_MERGE_REQUEST_SOURCE_BRANCH_NAME")
_PUSHED_BRANCH = ("CI_COMMIT_BRANCH", "CIRCLE_BRANCH", "BUILDKITE_BRANCH", "BRANCH_NAME")
_BRANCHES, _REMOTES = "refs/heads/", "refs/remotes/"


@dataclass(frozen=True, slots=True)
class CloneHistory:
    """Additions of a clone to a stored history.

    note: a limitation of it, for a person, and how commits are ordered instead; may be empty.
    """

    ancestry: Ancestry
    note: str = ""


def read_history(
    root: Path, shas: Sequence[str], project: str, known: KnownHistory
) -> CloneHistory:
    """Read what a clone knows of the history of commits, and the database does not.

    Reads parents only of commits that are not stored yet. Without a part of the history (a shallow
    clone, missing objects) the note says so. Raises GitError if git does not run.
    """
    remote = _remote(root)
    tips = {
        name: Tip(tip.sha, tip.at, is_certain=_has_tip(root, known, name, tip.sha))
        for name, tip in _tips(root, remote).items()
    }
    shallow = _shallow_commits(root)
    parents, note = _parents(root, shas, tips, known, shallow)
    if not note and tips and not shallow and (others := _unreached(root, shas, tips)):
        note = (
            f"no branch of {root} reaches {others[0][:10]}: its results are kept, and left out of "
            "the history"
        )
        note += f" (and {len(others) - 1} more)" if len(others) > 1 else ""
    has_all = _has_every_branch(root, remote, shallow)
    deleted = known.tips.keys() - tips.keys() if has_all else ()
    ancestry = Ancestry(
        project, parents, tips, _main_branch(root, remote, known, tips), tuple(sorted(deleted))
    )
    return CloneHistory(ancestry, note)


def measured_branch(root: Path | None = None, sha: str = "") -> str:
    """Return the branch that is measured: of the CI job, else the one checked out at this commit.

    A pull request's is its source branch. Empty: unknown. root None: there is no clone.
    """
    named = [os.environ.get(name, "") for name in _SOURCE_BRANCH]
    reference = os.environ.get("GITHUB_REF", "")
    if reference.startswith(_BRANCHES):
        named.append(reference.removeprefix(_BRANCHES))
    named += [os.environ.get(name, "") for name in _PUSHED_BRANCH]
    for name in filter(None, named):
        return name
    if root is None or _first_line(root, "rev-parse", "HEAD") != sha:
        return ""
    return _checked_out(root)


def _parents(
    root: Path,
    shas: Sequence[str],
    tips: Mapping[str, Tip],
    known: KnownHistory,
    shallow: Collection[str],
) -> tuple[dict[str, tuple[str, ...]], str]:
    """Return the parents of the commits that are not stored, and a note on what is missing."""
    wanted = [*shas, *(tip.sha for tip in tips.values())]
    lines: list[str] = []
    note = ""
    try:
        lines += _listed(root, [*wanted, *(f"^{head}" for head in known.heads)])
        if known.open_ends:  # of a clone that was shallow: it may have been deepened
            lines += _listed(root, known.open_ends)
    except GitError as error:
        note = (
            f"the history of {root} can't be read ({error}): its commits are ordered by their "
            "times; git fsck there shows what is missing"
        )
        lines = list(shas)
    parents = {commit: tuple(others) for commit, *others in map(str.split, lines)}
    # git hides the parents of these, which the commits themselves name.
    for commit in parents.keys() & {*shallow, *(shas if note else ())}:
        parents[commit] = parents_of(root, commit)
    if shallow and not note:
        note = (
            f"{root} is a shallow clone: commits whose ancestry is not known are ordered by their "
            "times (git fetch --unshallow; in a workflow: fetch-depth: 0)"
        )
    return parents, note


def _listed(root: Path, revisions: Collection[str]) -> list[str]:
    listing = ("rev-list", "--parents", "--topo-order", "--ignore-missing", "--stdin")
    return git_output(root, *listing, input_text="\n".join(revisions)).splitlines()


def _tips(root: Path, remote: str) -> dict[str, Tip]:
    """Return the tips of branches, of the newer of a local and a remote one, newest first."""
    form = "%(refname) %(objectname) {time} %(symref)"
    listing = ("for-each-ref", f"--count={_MAX_BRANCHES}")
    places = [_BRANCHES, *([f"{_REMOTES}{remote}/"] if remote else [])]
    shown = f"--format={form.format(time='%(committerdate:unix)')}"
    try:
        lines = git_lines(root, *listing, "--sort=-committerdate", shown, *places)
    except GitError:  # git ends at a commit whose time it can't show
        lines = git_lines(root, *listing, f"--format={form.format(time=0)}", *places)
    tips: dict[str, Tip] = {}
    for line in lines:
        reference, sha, seconds, *symbolic = line.split(" ")
        at = time_of(seconds)
        if "".join(symbolic) or at is None:
            continue
        prefix = next(place for place in places if reference.startswith(place))
        tip = Tip(sha, at)
        name = reference.removeprefix(prefix)
        if name not in tips or (prefix == _BRANCHES and tips[name].at == tip.at):
            tips[name] = tip
    return tips


def _remote(root: Path) -> str:
    """Return the name of the remote whose branches count; empty: there is none."""
    remotes = git_lines(root, "remote")
    return "origin" if "origin" in remotes else next(iter(remotes), "")


def _main_branch(root: Path, remote: str, known: KnownHistory, tips: Mapping[str, Tip]) -> str:
    """Return the name of the main branch; empty: unknown.

    It is the remote's HEAD, else the one that a CI service or the database names, else one with a
    usual name, else the one that is checked out, else the only one.
    """
    head = _first_line(root, "symbolic-ref", "--quiet", f"{_REMOTES}{remote}/HEAD")
    candidates = [
        head.removeprefix(f"{_REMOTES}{remote}/"),
        os.environ.get("CI_DEFAULT_BRANCH", ""),
        known.main,
        *(name for name in MAIN_NAMES if name in tips),
        _checked_out(root),
        *(tips if len(tips) == 1 else ()),
    ]
    return next((name for name in candidates if name and name in {*tips, known.main}), "")


def _checked_out(root: Path) -> str:
    return _first_line(root, "symbolic-ref", "--quiet", "--short", "HEAD")


def _has_tip(root: Path, known: KnownHistory, name: str, sha: str) -> bool:
    """Return True if a clone has the stored tip of a branch, so that its own one is not older."""
    stored = known.tips.get(name)
    if stored is None or stored.sha == sha:
        return True
    return run_git(root, "cat-file", "-e", f"{stored.sha}^{{commit}}").returncode == 0


def _unreached(root: Path, shas: Sequence[str], tips: Mapping[str, Tip]) -> list[str]:
    """Return the commits that no branch reaches."""
    others = set(shas) - {tip.sha for tip in tips.values()}
    if not others:
        return []
    listing = ("rev-list", "--stdin", "--not", "--branches", "--remotes")
    listed = git_output(root, *listing, input_text="\n".join(others)).split()
    return sorted(others.intersection(listed))


def _has_every_branch(root: Path, remote: str, shallow: Collection[str]) -> bool:
    """Return True if a clone would have a branch that exists: it fetches all of them."""
    if shallow:
        return False
    if not remote:
        return True
    fetched = run_git(root, "config", "--get-all", f"remote.{remote}.fetch").stdout
    return "refs/heads/*" in fetched


def _shallow_commits(root: Path) -> frozenset[str]:
    """Return the commits at the end of a shallow clone; empty: it is not shallow."""
    file = root / git_output(root, "rev-parse", "--git-path", "shallow")
    try:
        return frozenset(file.read_text().split())
    except OSError:
        return frozenset()


def _first_line(root: Path, *arguments: str) -> str:
    """Return the first line of git's output; empty: it failed."""
    done = run_git(root, *arguments)
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""
