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
from typing import Any

VERSION = 1
# Of `fill` and `output`, of `kept` and `launches` of `turn`, of `inspect` of `leave`: only a judge
# needs them.
JUDGED_VERSION = 5
# GitHub takes these for commands, at the start of a line and anywhere in it; others do alike.
_COMMAND = re.compile(r"(?<!\S)::|##(?=\w*\[)")


def printable(text: str) -> str:
    """External text for a terminal or a report: no control characters, on one line."""
    return without_commands("".join(sign if sign.isprintable() else " " for sign in text))


def without_commands(text: str) -> str:
    """Escape what services that run jobs take for commands when they read a log."""
    return _COMMAND.sub(lambda match: f"\\x{ord(match[0][0]):x}{match[0][1]}", text)


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
