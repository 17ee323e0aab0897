"""Commits and branches of a project as a clone, or the database, knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

MAIN_NAMES = ("main", "master", "trunk")  # of a main branch that no clone has named

Parents = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Tip:
    """The newest commit of a branch, and its commit time.

    is_certain: False: the clone lacks the stored tip, which may be newer.
    """

    sha: str
    at: datetime
    is_certain: bool = True


@dataclass(frozen=True, slots=True)
class Ancestry:
    """A clone's knowledge of a project's history.

    parents: of commits by sha; empty: a root. tips: of branches by name. main: name of the main
    branch; empty: unknown. deleted: branches that the clone would have, and does not.
    """

    project: str
    parents: Parents
    tips: Mapping[str, Tip] = field(default_factory=dict)
    main: str = ""
    deleted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownHistory:
    """The database's knowledge of a project's history, so that a clone adds only the rest.

    main: name of the main branch; empty: unknown. tips: of open branches by name. heads: commits
    that are no parents. open_ends: parents whose own parents are unknown.
    """

    main: str
    tips: Mapping[str, Tip]
    heads: tuple[str, ...]
    open_ends: tuple[str, ...]
