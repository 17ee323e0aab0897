"""SVG badge of a branch: the worst verdict on its newest judged commit."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import Path

from flexq_bench.db import queries
from flexq_bench.db.errors import NotFoundError
from flexq_bench.read_api.responses import Parameters, Source
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
STYLES = ("flat-square", "flat")
_LABEL = "kernels"
_RADIUS_PX = {"flat-square": 0, "flat": 3}  # of the corners


@dataclass(frozen=True, slots=True)
class ShieldsBadge:
    """Content of an endpoint badge of shields.io (https://shields.io/badges/endpoint-badge)."""

    schemaVersion: int  # noqa: N815 (its name there)
    label: str
    message: str
    color: str


def badge_svg(source: Source, parameters: Parameters) -> str:
    """Return the badge of a branch or commit as an SVG.

    Raises NotFoundError for an unknown project, or a text that is neither a commit nor a branch,
    GitError if git does not run.
    """
    return svg(_LABEL, *_verdict(source, parameters), style=parameters.get("style", STYLES[0]))


def badge_shields(source: Source, parameters: Parameters) -> ShieldsBadge:
    """Return the same as data. Raises as badge_svg."""
    words, color = _verdict(source, parameters)
    return ShieldsBadge(1, _LABEL, words, color)


def _verdict(source: Source, parameters: Parameters) -> tuple[str, str]:
    """Return the worst verdict on a commit in words, and its colour."""
    revision, project = parameters.get("of"), parameters.get("project", "")
    if project and project not in queries.stored_texts(source.session, "project"):
        raise NotFoundError(f"no project {project!r:.60}: check its name")
    sha = None if revision is None else _sha(revision, source.repository)
    project = project or queries.main_project(source.session)
    counts = queries.verdicts_of_commit(source.session, sha, project=project)
    worst = next((verdict for verdict in _WORST_FIRST if counts.get(verdict.value)), None)
    if worst is None:
        return "not judged", _UNKNOWN
    plain = worst in (Verdict.SAME, Verdict.FASTER)
    return worst.value if plain else f"{counts[worst.value]} {worst.value}", _COLORS[worst]


def svg(label: str, words: str, color: str, *, style: str = STYLES[0]) -> str:
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
    size = f'width="{left + right}" height="{_HEIGHT_PX}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'role="img" aria-label="{name}"><title>{name}</title>'
        f'<clipPath id="r"><rect {size} rx="{_RADIUS_PX[style]}"/></clipPath>'
        f'<g clip-path="url(#r)"><rect width="{left}" height="{_HEIGHT_PX}" fill="#3B4048"/>'
        f'<rect x="{left}" width="{right}" height="{_HEIGHT_PX}" fill="{color}"/></g>'
        f'<g fill="#FFFFFF" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{fields}'
        "</g></svg>"
    )


def _sha(revision: str, repository: Path | None) -> str:
    if repository is not None and _BRANCH.fullmatch(revision) and ".." not in revision:
        sha = find_revision(repository, revision)
        if sha is None:  # does not list branches: their names may be private
            raise NotFoundError(f"no branch and no commit {revision!r:.60}")
        return sha
    if _SHA.fullmatch(revision):
        return revision
    raise NotFoundError(
        f"{revision!r:.60} is no commit: give its sha, or start the API with --repository, "
        "which knows branches"
    )
