"""Messages between a program and its worker processes: one JSON object per line, either way.

    {"id": 7, "do": "turn", "slot": "base"}
    {"id": 7, "reply": {"samples_us": [12.1, …], "mhz": 1980.0, "valid": true}}
    {"id": 7, "error": "no kernel 'flexq-w6a7': …", "refused": true}

id: of the request; one request may have several replies. refused: this case can't be measured, and
the worker continues with others. Commits of any age talk to one program, so names never change, and
VERSION is raised when the meaning of one changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

VERSION = 1
# Of `fill` and `output`, of `kept` and `launches` of `turn`, of `inspect` of `leave`: only a judge
# needs them.
JUDGED_VERSION = 5
# GitHub takes these for commands, at the start of a line and anywhere in it; others do alike.
_COMMAND = re.compile(r"(?<!\S)::|##(?=\w*\[)")


_MOST_CHARS = 4000  # of a text in a reply; errors have fewer
_MOST_VALUES = 100  # of a configuration, and of a tuple in it
_MOST_DEPTH = 4  # of tuples in tuples
_LARGEST = 1e18  # of any number: neither times, bytes, clocks nor versions are larger


def printable(text: str) -> str:
    """External text for a terminal or a report: no control characters, on one line."""
    return without_commands("".join(sign if sign.isprintable() else " " for sign in text))


def shown(text: str) -> str:
    """`printable` of a text of any length: its beginning."""
    return printable(text[:_MOST_CHARS])


def count_values(line: bytes) -> int:
    """Return the number of values in a message that is not parsed yet, at most."""
    return sum(map(line.count, (b",", b"[", b"{")))


def without_commands(text: str) -> str:
    """Escape what services that run jobs take for commands when they read a log."""
    return _COMMAND.sub(lambda match: f"\\x{ord(match[0][0]):x}{match[0][1]}", text)


def odd_value(reply: Mapping[str, Any]) -> str:
    """The name of a value that no worker gives unless external code does; empty: there is none.

    Whoever reads a reply relies on the types of these.
    """
    return next((name for name in _USUAL if name in reply and not _USUAL[name](reply[name])), "")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not abs(value) > _LARGEST


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_CHARS


def _is_plain(value: object) -> bool:
    return value is None or _is_number(value) or _is_text(value)


def _is_setting(value: object, depth: int = _MOST_DEPTH) -> bool:
    """Return True for a value of a configuration: plain, or a list, which was a tuple."""
    if not isinstance(value, list):
        return _is_plain(value)
    is_small = depth > 0 and len(value) <= _MOST_VALUES
    return is_small and all(_is_setting(of, depth - 1) for of in value)


def _is_config(value: object) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= _MOST_VALUES
        and all(_is_text(name) and _is_setting(of) for name, of in value.items())
    )


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(of) is int for of in value)


def _are_samples(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


_USUAL: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("root", "wrong"), _is_text),
    **dict.fromkeys(("version", "needed", "free", "copies", "launches"), _is_number),
    "binary": lambda value: value is None or _is_text(value),
    **dict.fromkeys(("mhz", "trim"), lambda value: value is None or _is_number(value)),
    "failed": lambda value: value is None or _is_pair(value),
    "max_rel_error": lambda value: value is None or isinstance(value, int | float),
    "config": _is_config,
    "samples_us": _are_samples,
}


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Parse one line. Raises ValueError if it is not a JSON object."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    return message
