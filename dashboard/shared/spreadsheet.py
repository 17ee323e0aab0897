"""Protection against CSV injection: spreadsheets run some texts as formulas.

Covers files for download, and cells that a viewer saves or copies from a table.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from flexq_bench.exchange.exports.cells import as_cell

_ZERO_WIDTH_SPACE = "\u200b"


def harmless(frame: pd.DataFrame) -> pd.DataFrame:
    """Prefix formulas in texts and column names with a zero-width space, for the screen.

    It is included when cells are copied or saved. Numbers and times are unchanged.
    """
    return _map_texts(frame, harmless_text)


def harmless_text(text: str) -> str:
    """Prefix a formula with a zero-width space."""
    return _ZERO_WIDTH_SPACE + text if as_cell(text) != text else text


def to_csv(frame: pd.DataFrame) -> str:
    """Return a frame as CSV without index, in full precision; texts and names by `as_cell`."""
    return _map_texts(frame, as_cell).to_csv(index=False)


def _map_texts(frame: pd.DataFrame, convert: Callable[[str], str]) -> pd.DataFrame:
    converted = frame.copy()
    for name in frame.columns:
        column = frame[name]
        if column.dtype == object or pd.api.types.is_string_dtype(column):
            converted[name] = [convert(v) if isinstance(v, str) else v for v in column]
    return converted.rename(columns=lambda name: convert(name) if isinstance(name, str) else name)
