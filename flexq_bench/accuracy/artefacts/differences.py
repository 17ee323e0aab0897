"""A difference between two folders, and the comparison of values from JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_FLOAT_TOLERANCE = 1e-6  # relative: some formats store single precision
_MAX_SHOWN = 120  # characters of a value


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference from the original.

    name: for a policy that allows it, for example `config.rope_parameters.factor`. detail: both
    values.
    """

    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


def changed(name: str, ours: Any, theirs: Any) -> Difference:
    """The difference of a value from the original's."""
    return Difference(name, f"{shown(ours)}, the original's: {shown(theirs)}")


def shown(value: Any) -> str:
    """A value in at most one line."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


def equal_values(ours: Any, theirs: Any) -> bool:
    """Return True for equal values of JSON. Floats may differ in their last digits."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        keys = ours.keys() | theirs.keys()
        return all(equal_values(ours.get(key), theirs.get(key)) for key in keys)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(equal_values, ours, theirs))
    numbers = isinstance(ours, int | float) and isinstance(theirs, int | float)
    if numbers and not isinstance(ours, bool) and not isinstance(theirs, bool):
        return math.isclose(ours, theirs, rel_tol=_FLOAT_TOLERANCE)
    return bool(ours == theirs)


def differing_leaves(name: str, ours: Any, theirs: Any) -> Iterator[Difference]:
    """The differences within two values of JSON, one for each entry of nested objects."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted(ours.keys() | theirs.keys(), key=str):
            yield from differing_leaves(f"{name}.{key}", ours.get(key), theirs.get(key))
    elif not equal_values(ours, theirs):
        yield changed(name, ours, theirs)
