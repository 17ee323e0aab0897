"""Error messages for unknown names: the nearest known ones first."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_MAX_LISTED = 16  # names in one line


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """Return all known names, those similar to `name` first, the rest in their order."""
    rest = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, rest, n=3, cutoff=0.5)
    return near + [other for other in rest if other not in near]


def listed(names: Sequence[str]) -> str:
    """Join names with commas; of many, the first ones and the number of the others."""
    if len(names) <= _MAX_LISTED:
        return ", ".join(names)
    return f"{', '.join(names[:_MAX_LISTED])} and {len(names) - _MAX_LISTED} more"


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return a one-line error for an unknown name, with the known ones."""
    names = nearest_first(name, known)
    return f"no {kind} {name!r}: there {'is' if len(names) == 1 else 'are'} {listed(names)}"
