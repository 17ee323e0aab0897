"""Lines of output, each written at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def say_row(row: Mapping[str, object]) -> None:
    """Write a row as a JSON line."""
    say(json.dumps(row))
