"""Messages between a program and its worker processes: one JSON object a line, either way.

    {"id": 7, "do": "turn", "slot": "base"}
    {"id": 7, "reply": {"samples_us": [12.1, …], "mhz": 1980.0, "valid": true}}
    {"id": 7, "error": "no kernel 'flexq-w6a7': …", "refused": true}

id: of the request that is answered; one request may have several answers. refused: this case can't
be measured, and the worker goes on with others. Commits of any age talk to one program, so words
stay, and VERSION is raised when one of them starts to mean something else.
"""

from __future__ import annotations

import json
from typing import Any

VERSION = 1
# Of `fill` and `output`, and of `launches` in the reply to `turn`: what a gate needs beside.
JUDGED_VERSION = 1


def printable(text: str) -> str:
    """Text of others for a terminal or a report: no control characters, on one line."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Raises ValueError if the line is not a JSON object."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    return message
