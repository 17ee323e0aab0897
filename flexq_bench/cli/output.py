"""Output of text and tables, and of JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping
from datetime import datetime
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexq_bench.exit_codes import INTERRUPTED
from flexq_bench.measure.worker_messages import without_commands

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PLAIN_WIDTH = 120  # columns of a table that is written to a file or a pipe
_MAX_WIDTH = 400


def console(*, stderr: bool = False) -> Console:
    """Create a console on stdout or stderr that shows texts and cells of tables `printable`.

    Without markup and :emoji:, as names contain brackets and colons.
    """
    from rich.console import Console
    from rich.text import Text

    class PrintableConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            literally = options | {"markup": False, "emoji": False}
            return super().render_str(printable(text), **literally)

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return PrintableConsole(file=stream, width=width, highlight=False, soft_wrap=False)


def say(out: Console, text: str) -> None:
    """Print a line without wrapping, as it may be a command to paste."""
    out.print(text, soft_wrap=True)


def say_interrupted(advice: str) -> int:
    """Print on stderr that an interrupted command can be continued; returns its exit code."""
    say(console(stderr=True), f"interrupted: what was measured is stored, continue with {advice}")
    return INTERRUPTED


def printable(text: str) -> str:
    """Escape control characters, and commands to whoever reads a log, in untrusted text.

    Tabs and line feeds stay; other control characters become `\\x1b` and the like.
    """
    escaped = (
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf") else _escaped(c)
        for c in text
    )
    return without_commands("".join(escaped))


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


def print_unbroken(out: Console, table: Table) -> None:
    """Print a table of numbers without truncation; a narrow terminal wraps its lines."""
    from rich.measure import Measurement

    widest = out.options.update(max_width=_MAX_WIDTH)
    needed = Measurement.get(out, widest, table).maximum
    shown = out.width
    out.width = max(shown, needed)
    out.print(table)
    out.width = shown


def print_wrapped(out: Console, table: Table) -> None:
    """Print a table with cells wrapped between words; if too wide, print a paragraph per row."""
    from rich.cells import cell_len
    from rich.measure import Measurement

    natural = [max(map(cell_len, lines)) for lines in _lines(table)]
    longest = [max(map(cell_len, " ".join(lines).split()), default=0) for lines in _lines(table)]
    between = Measurement.get(out, out.options.update(max_width=_MAX_WIDTH * len(natural)), table)
    spare = out.width - (between.maximum - sum(natural)) - sum(longest)
    if spare < 0:
        for paragraph in _paragraphs(table, out.width):
            say(out, paragraph)
        return
    widths = longest
    for _ in range(spare):  # widen the narrowest column that wraps, so that short texts don't
        breaking = [i for i, width in enumerate(widths) if width < natural[i]]
        if not breaking:
            break
        widths[min(breaking, key=lambda i: widths[i])] += 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    out.print(table)


def _lines(table: Table) -> list[list[str]]:
    """All lines of each column, including its heading."""
    return [
        [line for cell in (column.header, *column.cells) for line in str(cell).split("\n")]
        for column in table.columns
    ]


def _paragraphs(table: Table, width: int) -> Iterator[str]:
    """Format each row as its first cell, then the others with their headings."""
    headings = [str(column.header) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        cells = [" ".join(str(cell).split()) for cell in row]
        named = [
            f"{name} {cell}" for name, cell in zip(headings[1:], cells[1:], strict=True) if cell
        ]
        yield textwrap.fill(
            f"{cells[0]}  {'; '.join(named)}",
            width,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, in ASCII if a text could control a terminal."""
    document = partial(json.dumps, plain(value), indent=2)
    text = document(ensure_ascii=False)
    is_harmless = text.replace("\n", "").isprintable()
    sys.stdout.write((text if is_harmless else document(ensure_ascii=True)) + "\n")


def plain(value: Any) -> Any:
    """Convert dataclasses, times and enums to values for JSON; NaN and infinity become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, (tuple, list, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    return value
