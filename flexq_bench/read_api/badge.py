"""SVG badge of a branch: the worst verdict on its newest judged commit."""

from __future__ import annotations

import html
import re
from pathlib import Path

from flexq_bench.db import queries
from flexq_bench.db.engine import Session
from flexq_bench.errors import UsageError
from flexq_bench.repository.worktrees import find_revision
from flexq_bench.verdicts import Verdict

_SHA = re.compile(r"[0-9a-f]{7,64}")
_BRANCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_WORST_FIRST = (
    Verdict.INCORRECT,
    Verdict.SLOWER,
    Verdict.AMBIGUOUS,
    Verdict.FASTER,
    Verdict.SAME,
)
# Contrast with white text is at least 4.5.
_COLORS = {
    Verdict.INCORRECT: "#B3261E",
    Verdict.SLOWER: "#B3261E",
    Verdict.AMBIGUOUS: "#8A5A00",
    Verdict.FASTER: "#1B6E3C",
    Verdict.SAME: "#1B6E3C",
}
_UNKNOWN = "#5A6978"
_LETTER_PX, _PAD_PX, _HEIGHT_PX = 7, 10, 20


def badge_of(
    session: Session, revision: str | None, repository: Path | None, *, project: str = ""
) -> str:
    """Return the badge of a branch or commit.

    revision: name, sha or prefix; None: the watched branch. repository: for branch names; None:
    only commits. project: name of an external project; empty: this repository, or the first project
    where it has no timed result. Raises UsageError if it is neither a commit nor a branch, GitError
    if git does not run.
    """
    sha = None if revision is None else _sha(revision, repository)
    project = project or queries.main_project(session)
    counts = queries.verdicts_of_commit(session, sha, project=project)
    worst = next((verdict for verdict in _WORST_FIRST if counts.get(verdict.value)), None)
    if worst is None:
        return svg("kernels", "not judged", _UNKNOWN)
    number = counts[worst.value]
    plain = worst in (Verdict.SAME, Verdict.FASTER)
    words = worst.value if plain else f"{number} {worst.value}"
    return svg("kernels", words, _COLORS[worst])


def svg(label: str, words: str, color: str) -> str:
    """Return a badge with two fields, readable without its colour."""
    left, right = (_LETTER_PX * len(text) + _PAD_PX for text in (label, words))
    name = html.escape(f"{label}: {words}")
    fields = "".join(
        f'<text x="{x}" y="14" textLength="{width - _PAD_PX}">{html.escape(text)}</text>'
        for text, x, width in (
            (label, _PAD_PX // 2, left),
            (words, left + _PAD_PX // 2, right),
        )
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{_HEIGHT_PX}" '
        f'role="img" aria-label="{name}"><title>{name}</title>'
        f'<rect width="{left}" height="{_HEIGHT_PX}" fill="#3B4048"/>'
        f'<rect x="{left}" width="{right}" height="{_HEIGHT_PX}" fill="{color}"/>'
        f'<g fill="#FFFFFF" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{fields}'
        "</g></svg>"
    )


def _sha(revision: str, repository: Path | None) -> str:
    if repository is not None and _BRANCH.fullmatch(revision) and ".." not in revision:
        sha = find_revision(repository, revision)
        if sha is None:  # does not list branches: their names may be private
            raise UsageError(f"no branch and no commit {revision!r:.60}")
        return sha
    if _SHA.fullmatch(revision):
        return revision
    raise UsageError(
        f"{revision!r:.60} is no commit: give its sha, or start the API with --repository, "
        "which knows branches"
    )
