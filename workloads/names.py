"""Error messages for unknown names: the nearest known ones first."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_MOST = 16  # names that one line lists


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """All known names, those that resemble `name` first, the rest in their own order."""
    rest = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, rest, n=3, cutoff=0.5)
    return near + [other for other in rest if other not in near]


def listed(names: Sequence[str]) -> str:
    """Names with commas; of many the first ones, and how many more there are."""
    if len(names) <= _MOST:
        return ", ".join(names)
    return f"{', '.join(names[:_MOST])} and {len(names) - _MOST} more"


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One line: there is no such name, and which there are."""
    names = nearest_first(name, known)
    return f"no {kind} {name!r}: there {'is' if len(names) == 1 else 'are'} {listed(names)}"
