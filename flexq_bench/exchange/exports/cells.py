"""Protection against CSV injection: spreadsheets run some texts as formulas."""

from __future__ import annotations

import re

# Characters with which a formula begins (OWASP, CSV Injection).
_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")
_SIGNED = r"[+-]\d+(\.\d+)?"
_UNIT = "(%|points|ns|us|µs|ms|s|KB|MB|GB|MHz)"
_BOUNDS = rf"%, \d+ % bounds {_SIGNED}% and {_SIGNED}%"
# Harmless: signed numbers with units, and changes with bounds in the format of pages and verdicts.
_NUMBER = re.compile(
    rf"{_SIGNED}( {_UNIT}( to {_SIGNED} {_UNIT}| \({_SIGNED} to {_SIGNED}\)(, within noise)?)?"
    rf"|{_BOUNDS})?",
    re.ASCII,
)


def as_cell(text: str) -> str:
    """Prefix a text that a spreadsheet would run as a formula with an apostrophe."""
    is_formula = text.startswith(_FORMULA_PREFIXES) and not _NUMBER.fullmatch(text)
    return f"'{text}" if is_formula else text
