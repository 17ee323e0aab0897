"""JSON of model folders, where a file that says two things is refused."""

from __future__ import annotations

import json
from typing import Any


def loads_strictly(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for damaged text, NaN, and a name twice in one object.

    Parsers differ in which of two values they take. Infinity is accepted: transformers writes it.
    """
    return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_constant)


def decode_numbers(value: Any) -> Any:
    """Replace transformers' tag of a number that JSON lacks, `{"__float__": "Infinity"}`."""
    if isinstance(value, dict):
        if list(value) == ["__float__"]:
            return float(value["__float__"])
        return {key: decode_numbers(each) for key, each in value.items()}
    return [decode_numbers(each) for each in value] if isinstance(value, list) else value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"it has {name!r:.60} twice")
        values[name] = value
    return values


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("it holds NaN")
    return float(name)
