"""Tables that a viewer may open in a spreadsheet, which runs some texts as formulas.

Both ways out are covered: files that pages offer, and what a viewer saves or copies from a table,
which is what its cells hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pandas as pd

# OWASP, CSV Injection: what a cell begins with where spreadsheets look for a formula.
_BEGINS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NO_WIDTH = "\u200b"  # ZERO WIDTH SPACE
_SIGNED = r"[+-]\d+(\.\d+)?"
_UNIT = "(%|points|ns|us|µs|ms|s|KB|MB|GB|MHz)"
_BOUNDS = rf"%, \d+ % bounds {_SIGNED}% and {_SIGNED}%"
# Signed numbers with units, and changes with their bounds as pages and verdicts write them: no
# formula.
_NUMBER = re.compile(
    rf"{_SIGNED}( {_UNIT}( to {_SIGNED} {_UNIT}| \({_SIGNED} to {_SIGNED}\)(, within noise)?)?"
    rf"|{_BOUNDS})?",
    re.ASCII,
)


def as_cell(text: str) -> str:
    """The text with an apostrophe before it where a spreadsheet would run it: it then shows it."""
    is_formula = text.startswith(_BEGINS_A_FORMULA) and not _NUMBER.fullmatch(text)
    return f"'{text}" if is_formula else text


def harmless(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame for the screen: every text, and every column's name, that a spreadsheet would run
    begins with a sign of no width, which also goes along where cells are copied or saved. Numbers
    and times are as they are."""
    return _each_text(frame, lambda text: _NO_WIDTH + text if as_cell(text) != text else text)


def to_csv(frame: pd.DataFrame) -> str:
    """The frame as a file for a spreadsheet, full precision, without its index; texts and columns'
    names as `as_cell` makes them."""
    return _each_text(frame, as_cell).to_csv(index=False)


def _each_text(frame: pd.DataFrame, made_of: Callable[[str], str]) -> pd.DataFrame:
    made = frame.copy()
    for name in frame.columns:
        column = frame[name]
        if column.dtype == object or pd.api.types.is_string_dtype(column):
            made[name] = [made_of(v) if isinstance(v, str) else v for v in column]
    return made.rename(columns=lambda name: made_of(name) if isinstance(name, str) else name)
